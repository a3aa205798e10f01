"""What the console command offers beside server and demo, one module a subcommand."""
