"""conversations: the list, pins, files, branches and deletions, seen by the next request."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx_lm")

import mlx.core as mx
from mlx_lm import load
from mlx_lm.models.cache import load_prompt_cache

from pion_vllm_mlx.cache.connection import info_fields
from pion_vllm_mlx.cache.lineage import LineageOptions, LineageStore
from pion_vllm_mlx.cache.lineage.client import connect
from pion_vllm_mlx.errors import DamagedData
from pion_vllm_mlx.tools.conversation_file import bring_in
from pion_vllm_mlx.tools.lineage_access import Shelf
from tests.cache.lineage.driving import Engine, Turn, open_store, prompt, url_of
from tests.conftest import RunningServer, running_server
from tests.models import tiny_model
from tests.serve.tiny_folder import make_folder
from tests.tools.commands import Ran, command, here


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunningServer]:
    with running_server(tmp_path / "data") as one:
        yield one


def ran(server: RunningServer, *words: object) -> Ran:
    return command("conversations", *words, "--url", url_of(server))


def listed(server: RunningServer) -> dict[str, dict[str, Any]]:
    """The list, without a process of its own: most tests look at it several times."""
    with shelf_of(server) as shelf:
        return {one.id: one.as_json() for one in shelf.all()}


@contextmanager
def shelf_of(server: RunningServer) -> Iterator[Shelf]:
    client = connect(LineageOptions(url=url_of(server)))
    try:
        yield Shelf(client)
    finally:
        client.close()


def delete_all(server: RunningServer) -> None:
    """A conversation that others went on from appears when they are gone."""
    while found := sorted(listed(server), key=lambda name: -int(name.partition(":")[2])):
        assert ran(server, "delete", *found).code == 0


def turn(model: Any, server: RunningServer, ids: list[int], anchor: int | None = None) -> Turn:
    """One request of a new process: nothing but the store remembers anything."""
    store = open_store(model, server)
    try:
        done = Engine(model, store).turn(ids, reply=1, anchor=anchor)
        assert store.flush(60)
        return done
    finally:
        store.close()


def longest(server: RunningServer) -> dict[str, Any]:
    return max(listed(server).values(), key=lambda one: int(one["tokens"]))


def test_the_list_names_what_is_stored_and_how_it_begins(
    server: RunningServer, tmp_path: Path
) -> None:
    assert ran(server).out == "no conversations are stored\n"
    make_folder(tmp_path / "llama", "llama")
    loaded: Any = load(str(tmp_path / "llama"))
    model, tokenizer = loaded[0], loaded[1]
    said = "Once upon a time there was a prefix that was computed again and again."
    turn(model, server, tokenizer.encode(said))
    turn(tiny_model("mamba"), server, prompt(40, 1))
    found = ran(server, "--json", "--model", tmp_path / "llama").json
    texts = {one["model"].partition("-")[0]: one["begins"] for one in found}
    assert set(texts) == {"llama", "mamba"} and texts["mamba"] is None
    assert said.startswith(texts["llama"].rstrip("…")) and len(texts["llama"]) > 10
    of = {one["model"].partition("-")[0]: one for one in found}
    assert of["llama"]["tokens"] == len(tokenizer.encode(said)) - 1
    assert of["mamba"]["checkpoints"] == [39] and of["mamba"]["bytes"] > 0
    table = ran(server, "--model", tmp_path / "llama").out.splitlines()
    assert len(table) == 3 and "BEGINS" in table[0]
    assert any("Once upon a time" in line and of["llama"]["id"] in line for line in table)
    turn(model, server, tokenizer.encode(f"{said[:40]}+ and something of its own, 42"))
    found = ran(server, "--json", "--model", tmp_path / "llama").json
    assert {one["begins"] for one in found} == {None, texts["llama"], "…+ and something of its o"}


def test_pins_hold_what_a_conversation_stands_on_until_nobody_needs_it(
    server: RunningServer,
) -> None:
    model, system = tiny_model("llama"), prompt(64, 3)
    turn(model, server, [*system, *prompt(40, 4)])
    turn(model, server, [*system, *prompt(40, 5)])
    (one, two) = sorted(listed(server))
    root_of = {name: pins(server, name) for name in (one, two)}
    assert ran(server, "pin", one, two).code == 0
    assert all(entry["pinned"] for entry in listed(server).values())
    assert ran(server, "unpin", two).code == 0
    now = listed(server)
    assert now[one]["pinned"] and not now[two]["pinned"]
    assert pins(server, one) > root_of[one]
    assert ran(server, "unpin", one).code == 0
    assert not any(entry["pinned"] for entry in listed(server).values())
    assert pins(server, one) == 0


@pytest.mark.parametrize("word", ["unpin", "delete"])
def test_a_pin_that_goes_takes_those_along_that_nobody_set(
    server: RunningServer, word: str
) -> None:
    """What was pinned by its own id keeps its pin, and so does what another pinned one needs."""
    model, first = tiny_model("llama"), prompt(64, 3)
    turn(model, server, first)
    turn(model, server, [*first[:60], *prompt(40, 4)])
    turn(model, server, [*first[:60], *prompt(40, 4)[:30], *prompt(40, 5)])
    turn(model, server, [*first[:50], *prompt(40, 6)])
    root, middle, top, other = sorted(listed(server), key=lambda one: int(one.rpartition(":")[2]))

    def pinned() -> set[str]:
        return {name for name, one in listed(server).items() if one["pinned"]}

    assert ran(server, "pin", top).code == 0
    assert pinned() == {root, middle, top}
    assert ran(server, word, top).code == 0
    assert pinned() == set()
    assert ran(server, "pin", middle, other).code == 0
    assert ran(server, word, middle).code == 0
    assert pinned() == {root, other}
    assert "stays pinned" in ran(server, "unpin", root).out
    assert ran(server, word, other).code == 0
    assert pinned() == set()
    assert ran(server, "pin", root).code == 0
    turn(model, server, [*first[:50], *prompt(40, 7)])
    last = (
        longest(server)["id"]
        if word == "unpin"
        else max(listed(server), key=lambda one: int(one.rpartition(":")[2]))
    )
    assert last != root
    assert ran(server, "pin", last).code == ran(server, word, last).code == 0
    assert pinned() == {root}


def test_what_was_deleted_and_leads_to_others_is_no_conversation(server: RunningServer) -> None:
    model, first = tiny_model("llama"), prompt(64, 3)
    turn(model, server, first)
    (root,) = listed(server)
    turn(model, server, [*first[:40], *prompt(40, 4)])
    assert ran(server, "delete", root).code == 0 and root not in listed(server)
    for word in ("pin", "unpin"):
        done = ran(server, word, root)
        assert (done.code, "no such conversation" in done.err) == (1, True), done


def test_looking_at_a_folder_that_is_not_there_makes_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = here(capsys, "conversations", "list", "--url", f"embedded://{tmp_path / 'new'}")
    assert (done.code, "there is no store" in done.err) == (1, True), done
    assert not (tmp_path / "new").exists()


def pins(server: RunningServer, conversation: str) -> int:
    """How many segments of a conversation's chain are pinned."""
    with shelf_of(server) as shelf:
        return sum(one.pinned for one in shelf.chain(conversation))


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("llama", mx.bfloat16),
        ("gemma3_text", mx.float32),
        ("qwen3_next", mx.float32),
        ("deepseek_v3", mx.float32),
        ("falcon_h1", mx.float32),
    ],
)
def test_an_exported_conversation_is_the_same_hit_again_after_its_import(
    server: RunningServer, tmp_path: Path, family: str, dtype: mx.Dtype
) -> None:
    model, file = tiny_model(family, dtype), tmp_path / "one.safetensors"
    first = prompt(100, 6)
    turn(model, server, first)
    longer = [*first, *prompt(60, 7)]  # a chain, where an anchor or a sibling cuts it
    turn(model, server, [*first[:70], *prompt(50, 8)])
    turn(model, server, longer)
    before = turn(model, server, [*longer, 5, 6, 7])
    one = longest(server)
    export = ran(server, "export", one["id"], file)
    assert export.code == 0, export.err
    loaded = load_prompt_cache(str(file))
    assert len(loaded) == len(model.layers)
    delete_all(server)
    assert turn(model, server, first[:30]).reused == 0
    assert ran(server, "import", file).out.endswith("tokens stored\n")
    assert longest(server)["tokens"] == one["tokens"]
    again = turn(model, server, [*longer, 5, 6, 7])
    assert again.reused >= before.reused >= len(longer) - 1
    assert again.reply == before.reply
    assert "stored already" in ran(server, "import", file).out


def test_a_file_that_was_changed_or_is_another_models_is_refused(
    server: RunningServer, tmp_path: Path
) -> None:
    pytest.importorskip("starlette")  # --model loads it as serve does
    make_folder(tmp_path / "mine", "llama")
    make_folder(tmp_path / "other", "llama", num_hidden_layers=1)
    loaded: Any = load(str(tmp_path / "mine"))
    turn(loaded[0], server, prompt(50, 9))
    name, file = longest(server)["id"], tmp_path / "one.safetensors"
    assert ran(server, "export", name, file).code == 0
    assert ran(server, "export", name, file).code == 1  # nothing is overwritten
    refused = ran(server, "import", file, "--model", tmp_path / "other")
    assert refused.code == 1 and "another key" in refused.err
    assert ran(server, "delete", name).code == 0
    content = file.read_bytes()
    header = int.from_bytes(content[:8], "little")
    places = json.loads(content[8 : 8 + header])
    key = next(key for key, one in places.items() if len(one.get("shape", ())) == 4)
    byte = 8 + header + places[key]["data_offsets"][0]
    file.write_bytes(content[:byte] + bytes([content[byte] ^ 1]) + content[byte + 1 :])
    refused = ran(server, "import", file)
    assert refused.code == 1 and "is not what its checksum says" in refused.err
    moved = content.replace(name.encode(), f"{'0' * 12}:1".encode())
    assert len(moved) <= len(content)
    file.write_bytes(moved + bytes(len(content) - len(moved)))
    refused = ran(server, "import", file)
    assert refused.code == 1, refused.out
    assert listed(server) == {}
    file.write_bytes(content)
    assert ran(server, "import", file, "--model", tmp_path / "mine").code == 0
    assert listed(server)


def test_a_damaged_file_is_refused_also_where_its_conversation_is_stored(
    server: RunningServer, tmp_path: Path
) -> None:
    turn(tiny_model("llama"), server, prompt(40, 9))
    file = tmp_path / "one.safetensors"
    assert ran(server, "export", longest(server)["id"], file).code == 0
    content = file.read_bytes()
    header = int.from_bytes(content[:8], "little")
    places = json.loads(content[8 : 8 + header])
    del places["__metadata__"]
    for place in places.values():
        start, end = (8 + header + at for at in place["data_offsets"])
        for byte in {start, (start + end) // 2, end - 1}:
            damaged = bytes([content[byte] ^ 1])
            file.write_bytes(content[:byte] + damaged + content[byte + 1 :])
            with shelf_of(server) as shelf, pytest.raises(DamagedData):
                bring_in(shelf, file)
    refused = ran(server, "import", file)
    assert refused.code == 1 and "stored already" not in refused.out
    file.write_bytes(content)
    assert "stored already" in ran(server, "import", file).out


def test_a_branch_outlives_the_conversation_it_came_from(
    server: RunningServer, tmp_path: Path
) -> None:
    model, ids = tiny_model("llama"), prompt(150, 10)
    turn(model, server, ids)
    original = longest(server)["id"]
    branched = ran(server, "branch", original, "--at", 90)
    assert branched.code == 0, branched.err
    name = branched.out.partition(": ")[0]
    assert listed(server)[name]["tokens"] == 90
    assert ran(server, "export", name, tmp_path / "b.safetensors").code == 0
    assert ran(server, "delete", original).code == 0
    assert turn(model, server, ids).reused in (89, 90)
    assert ran(server, "branch", name, "--at", 91).code == 1
    short = ran(server, "branch", name, "--at", 5)
    assert (short.code, "never restored" in short.err) == (1, True)


def test_what_others_go_on_from_is_not_deleted_under_them(server: RunningServer) -> None:
    model, system = tiny_model("llama"), prompt(64, 11)
    turn(model, server, [*system, *prompt(40, 12)], anchor=64)
    ids = [*system, *prompt(40, 12)]
    anchors = [name for name, one in listed(server).items() if one["anchor"]]
    assert len(anchors) == 1
    refused = ran(server, "delete", anchors[0])
    assert refused.code == 1 and "go on from" in refused.err
    assert turn(model, server, ids).reused == len(ids) - 1


@pytest.mark.parametrize("order", ["latest first", "oldest first", "one by one"])
def test_when_all_that_is_listed_was_deleted_nothing_is_left(
    server: RunningServer, order: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model, system = tiny_model("llama"), prompt(64, 31)
    first = [*system, *prompt(80, 32)]
    turn(model, server, first, anchor=64)
    turn(model, server, [*system, *prompt(40, 33)], anchor=64)
    for cut, seed in ((120, 34), (100, 35)):  # two that leave the first one, in the middle
        turn(model, server, [*first[:cut], *prompt(40, seed)], anchor=64)
    turn(model, server, [*system[:30], *prompt(60, 36)])  # and one that leaves the anchor
    names = sorted(listed(server), key=lambda name: int(name.partition(":")[2]))
    assert len(names) == 6
    if order == "one by one":  # what others stand on as soon as it may go
        while names:
            words = ("conversations", "delete", "--url", url_of(server))
            gone = [name for name in names if here(capsys, *words, name).code == 0]
            assert gone, names
            names = [name for name in names if name not in gone]
    else:
        names = names if order == "oldest first" else names[::-1]
        done = ran(server, "delete", *names)
        assert done.code == 0, done.err
    assert not listed(server)
    client = connect(LineageOptions(url=url_of(server)))
    (info,) = client.demand("x", [("KV.PREFIX.INFO",)])
    assert int(info_fields(info)["vstore_bytes"]) == 0
    keys = {key.decode().split(":")[2] for key in client.demand("x", [("KEYS", "pps:*:*")])[0]}
    assert keys <= {"layout", "key", "nextseg"}
    client.close()


def test_wrong_ids_and_words_are_named(
    server: RunningServer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    file = tmp_path / "x.safetensors"
    for words, code, says in (
        (("pin", "nonsense"), 1, "no conversation"),
        (("pin", "0123456789ab: 7"), 1, "no conversation"),
        (("pin", "0123456789ab:07"), 1, "no conversation"),
        (("pin", "0123456789ab:7"), 1, "no such conversation"),
        (("delete", "0123456789ab:7"), 1, "no such conversation"),
        (("export", "0123456789ab:7", file), 1, "no such conversation"),
        (("export", "0123456789ab:7", tmp_path / "x.bin"), 1, ".safetensors"),
        (("import", file), 1, "no such file"),
        (("branch", "0123456789ab:7", "--at", "x"), 2, "no whole number"),
        (("pin",), 2, "required"),
        (("burn",), 2, "invalid choice"),
        (("list", "--model", tmp_path / "none"), 1, "cannot be loaded"),
    ):
        done = here(capsys, "conversations", *words, "--url", url_of(server))
        assert (done.code, says in done.err) == (code, True), (words, done)
    assert not file.exists()
    gone = here(capsys, "conversations", "--url", "tcp://127.0.0.1:1")
    assert gone.code == 1 and "pion-server" in gone.err


def test_lineage_stores_are_not_needed_to_look_at_them(server: RunningServer) -> None:
    """The id in the list is the one that the store itself uses."""
    model = tiny_model("llama")
    turn(model, server, prompt(40, 13))
    store: LineageStore = open_store(model, server)
    try:
        assert [one.id for one in store.conversations()] == list(listed(server))
    finally:
        store.close()
