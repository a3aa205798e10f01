"""Settings: the only module that reads the environment.

Everything else receives a frozen dataclass or a path.  Values are read when the function or
``from_environment`` is called, never at import, so that two objects of one process may be
built under different settings.

===============================  ===============================================================
variable                         effect
===============================  ===============================================================
PION_DATA_DIR                    data folder of the embedded server
PION_MODEL_DIR                   folder of converted models
PION_REQUIREPASS                 password of the server, also used by its embedded clients
PION_EXPORT_DIR                  folder of V.EXPORT files
PION_TLS_CA_FILE                 CA that clients trust behind tls://, not the system's
PION_TLS_CERT_FILE               certificate that clients show there
PION_TLS_KEY_FILE                its key, where it is not in the same file
PION_PROMPT_CACHE_NO_INPROC=1    no in-process lane
PION_PROMPT_CACHE_NO_BINARY=1    no binary lane
PION_PROMPT_CACHE_NO_BATCH=1     RANGE a layer instead of BATCH
PION_PROMPT_CACHE_NO_EXPORT=1    no export lane and no mapped lane
PION_DISABLE_FUSED_ATTEND=1      two-step merge on the client
PION_NO_EXPLICIT_EVAL=1          skip the explicit evaluation barrier
PION_DEBUG_SPARSE_AUTO=1         print failing sparse calls
PION_KERNEL                      attention kernels to use: reference, cpu, mlx, metal or cuda
PION_LINEAGE=0                   conversations are reused where a whole kept prompt is, only
PION_API_KEY                     key of serve's clients, where --api-key names none
PION_ENGINE_KEY                  what serve and its engine process share; set by serve
PION_ENGINE_TENANT               whose prefixes the engine process stores; set by serve
===============================  ===============================================================
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import platformdirs

from pion_vllm_mlx.errors import ConfigError

APP_NAME = "pion-vllm-mlx"
DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 1974

# What a data folder holds beside the store, for server and clients.
LOCK_NAME = "pion.lock"
STATUS_NAME = "pion.status"
DIRECTORY_NAME = "pion.directory"  # of the workers of a server, while it runs
ADMIN_NAME = "default"  # the user whose password is the server's own; others are tenants
AFFINITY_OFFSET = 2  # worker w listens on this many ports above the shared one, plus w
EXIT_FOLDER_BUSY = 3  # of a server that found its folder owned by another

GIGABYTE = 10**9

# Smallest sun_path of the systems served (macOS), less the closing NUL.
MAX_SOCKET_PATH_BYTES = 103

_RUN_MODULE = """\
import runpy, sys
sys.path.remove("")
del sys.argv[0]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)"""


def as_utf8(text: str, what: str) -> str:
    """A word of the command line or the environment, if it can be sent. Raises ValueError."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{what} must be UTF-8 text") from None
    return text


def _switched_on(environ: Mapping[str, str], name: str) -> bool:
    """Whether a switch is set to anything but nothing or ``0``."""
    return environ.get(name, "") not in ("", "0")


@dataclass(frozen=True)
class ClientSwitches:
    """Which lanes and shortcuts a client object may use; read once, when it is built."""

    no_inproc: bool = False
    no_binary: bool = False
    no_batch: bool = False
    no_export: bool = False
    no_fused_attend: bool = False
    no_explicit_eval: bool = False
    debug_sparse_auto: bool = False
    lineage: bool = True

    @property
    def no_mapped(self) -> bool:
        """Whether the mapped lane is off: it and the export lane share one switch."""
        return self.no_export

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> ClientSwitches:
        """Read the switches; ``environ`` defaults to the process's environment."""
        env = os.environ if environ is None else environ
        return cls(
            no_inproc=_switched_on(env, "PION_PROMPT_CACHE_NO_INPROC"),
            no_binary=_switched_on(env, "PION_PROMPT_CACHE_NO_BINARY"),
            no_batch=_switched_on(env, "PION_PROMPT_CACHE_NO_BATCH"),
            no_export=_switched_on(env, "PION_PROMPT_CACHE_NO_EXPORT"),
            no_fused_attend=_switched_on(env, "PION_DISABLE_FUSED_ATTEND"),
            no_explicit_eval=_switched_on(env, "PION_NO_EXPLICIT_EVAL"),
            debug_sparse_auto=_switched_on(env, "PION_DEBUG_SPARSE_AUTO"),
            lineage=env.get("PION_LINEAGE", "1") != "0",
        )


@dataclass(frozen=True)
class ServerEnvironment:
    """What the server takes from the environment; its flags take precedence."""

    password: str | None = None
    export_dir: Path | None = None

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> ServerEnvironment:
        """Read the settings; empty values count as unset. Raises ConfigError."""
        env = os.environ if environ is None else environ
        export_dir = env.get("PION_EXPORT_DIR")
        password = env.get("PION_REQUIREPASS") or None
        if password is not None:
            try:
                as_utf8(password, "PION_REQUIREPASS")
            except ValueError as error:
                raise ConfigError(str(error)) from None
        return cls(
            password=password,
            export_dir=Path(export_dir) if export_dir else None,
        )


@dataclass(frozen=True)
class ClientTls:
    """Files of a client's TLS: whom it trusts (None: whom the system does), what it shows."""

    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> ClientTls:
        """Read the settings; empty values count as unset."""
        env = os.environ if environ is None else environ
        names = ("PION_TLS_CA_FILE", "PION_TLS_CERT_FILE", "PION_TLS_KEY_FILE")
        chosen = [env.get(name) for name in names]
        return cls(*(Path(path).expanduser() if path else None for path in chosen))


@dataclass(frozen=True)
class EngineEnvironment:
    """What an engine process of ``serve`` gets through its environment: ``ps`` shows no flags."""

    key: str = field(default="", repr=False)
    tenant: str = ""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> EngineEnvironment:
        """Read what the front has set; empty without one."""
        env = os.environ if environ is None else environ
        return cls(env.get("PION_ENGINE_KEY", ""), env.get("PION_ENGINE_TENANT", ""))

    def variables(self) -> dict[str, str]:
        """The variables that say so."""
        return {"PION_ENGINE_KEY": self.key, "PION_ENGINE_TENANT": self.tenant}


@dataclass(frozen=True)
class EmbeddedDefaults:
    """What an embedded server does unless a flag says otherwise.

    ``idle_exit_seconds``: how long it outlives its last connection;
    ``first_client_seconds``: how long it waits for its first one.
    """

    disk_budget_cap_bytes: int = 20 * GIGABYTE
    disk_budget_share: float = 0.10
    max_sessions: int = 65_536
    idle_exit_seconds: float = 2.0
    first_client_seconds: float = 3.0

    def disk_budget_bytes(self, folder: Path) -> int:
        """The disk budget for ``folder``: the cap, or a share of what is free there if less.

        What the folder has already counts as free, and is always within it: a start throws
        nothing out because others have filled the disk.
        """
        free = shutil.disk_usage(_existing_parent(folder)).free
        return self.budget_of(free, _occupied_bytes(folder))

    def budget_of(self, free: int, own: int) -> int:
        """``disk_budget_bytes`` by what is free on the disk and what the folder has, in bytes."""
        share = int((free + own) * self.disk_budget_share)
        return max(1, min(self.disk_budget_cap_bytes, max(share, own)))


def _occupied_bytes(folder: Path) -> int:
    """What the files of a folder occupy on disk."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # a file may go meanwhile
            total += path.lstat().st_blocks * 512
    return total


def _existing_parent(path: Path) -> Path:
    """``path`` or its nearest ancestor that exists."""
    for candidate in (path.absolute(), *path.absolute().parents):
        if candidate.exists():
            return candidate
    return Path(path.anchor or "/")


def data_dir() -> Path:
    """The data folder of the embedded server; not created here."""
    chosen = os.environ.get("PION_DATA_DIR")
    if chosen:
        return Path(chosen).expanduser()
    return platformdirs.user_data_path(APP_NAME, appauthor=False)


def model_dir() -> Path:
    """The folder in which converted models are kept; not created here."""
    chosen = os.environ.get("PION_MODEL_DIR")
    if chosen:
        return Path(chosen).expanduser()
    return platformdirs.user_cache_path(APP_NAME, appauthor=False) / "models"


def module_command(module: str) -> list[str]:
    """Runs a module in a process of its own, whatever files lie in the working folder.

    ``-m`` alone looks there first for everything that is imported.
    """
    if hasattr(sys.flags, "safe_path"):
        return [sys.executable, "-P", "-m", module]
    return [sys.executable, "-c", _RUN_MODULE, module]  # Python 3.10 has no -P


def module_environment(**prepend: str) -> dict[str, str]:
    """As ``child_environment``, and the child finds the package where we did."""
    return child_environment({**prepend, "PYTHONPATH": str(Path(__file__).parent.parent)})


def child_environment(prepend: Mapping[str, str]) -> dict[str, str]:
    """A copy of the environment for a child process, with entries put before path lists."""
    env = dict(os.environ)
    for name, entry in prepend.items():
        known = env.get(name)
        env[name] = f"{entry}{os.pathsep}{known}" if known else entry
    return env


def set_up_products() -> None:
    """How the libraries, where they are not loaded yet, multiply for a server that attends.

    Numpy's BLAS starts no threads: kernels on the processor deal their work to threads of their
    own, and those of a BLAS would turn for tens of milliseconds behind every product, on
    processors that others need. MLX keeps all bits of a float32 on CUDA, whose products it would
    round to TF32. What the user chose stays.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ.setdefault("MLX_ENABLE_TF32", "0")


def forced_kernel() -> str | None:
    """The name of the attention kernels to use whatever the table of choices says."""
    return os.environ.get("PION_KERNEL") or None


def serve_api_key() -> str | None:
    """The API key of ``serve`` where no flag names one."""
    return os.environ.get("PION_API_KEY") or None


def preloaded_libraries() -> str:
    """The dynamic loader's list of preloaded libraries, empty where there is none."""
    return os.environ.get("LD_PRELOAD", "")


def socket_dir(name_bytes: int = 40) -> Path:
    """A private folder (mode 0700, ours) for Unix sockets whose names have ``name_bytes``.

    The runtime folder of the login session where there is one, else the temporary folder, else
    ``/tmp``, which is short everywhere.

    Raises ``ConfigError`` when none of them can hold a private folder with a short enough path.
    """
    refusals = []
    for parent in _socket_parents():
        folder = parent / f"pion-{os.getuid()}"
        if len(os.fsencode(folder)) + 1 + name_bytes > MAX_SOCKET_PATH_BYTES:
            refusals.append(f"{folder} is too long")
            continue
        reason = _make_private(folder)
        if reason is None:
            return folder
        refusals.append(f"{folder}: {reason}")
    raise ConfigError("no folder for the server's Unix socket: " + "; ".join(refusals))


def _socket_parents() -> list[Path]:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    parents = [Path(runtime)] if runtime else []
    return [*parents, Path(tempfile.gettempdir()), Path("/tmp")]


def _make_private(folder: Path) -> str | None:
    """Make ``folder`` with mode 0700, or say why it cannot be trusted."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = os.lstat(folder)
    except OSError as error:
        return str(error.strerror)
    if not os.path.isdir(folder) or os.path.islink(folder):
        return "not a folder"
    # In a folder that anybody may write to, somebody else may have made it first.
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        return "belongs to somebody else, or others may write to it"
    return None
