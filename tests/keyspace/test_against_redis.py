"""Every command answers what a real redis-server answers, byte types and errors included."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.conftest import RunningServer
from tests.server.wire import Wire

BINARY = b"\x01\x02\xff\r\n\x00*$"
BIG = 2**63 - 1

STRINGS = """
    GET k | SET k v | GET k | SET k w NX | SET k w XX | SET k x GET | SET n x GET | SET k v EX 100
    TTL k | SET k v KEEPTTL | TTL k | SET k v | TTL k | SET k v EX 0 | SET k v PX -1 | SET k v EX a
    SET k v EX 1 PX 1 | SET k v BOGUS | SET k v NX XX | SET k v EX | SET k | SET k v EX 1 KEEPTTL
    SETNX k z | SETNX new z | GET new | SETEX s 100 v | TTL s | SETEX s 0 v | SETEX s x v
    MSET a 1 b 2 a 3 | MGET a b nope | MSET a | MSET a 1 b | APPEND k 123 | APPEND fresh x
    GET fresh
    STRLEN k | STRLEN nope | LPUSH l 1 | GET l | APPEND l x | STRLEN l | MGET l a | SET l v | TYPE l
    SET k v EXAT 1 | EXISTS k | SET k v PXAT 99999999999999 | TTL none | SETNX k | GET | GET a b
    SET k v GET NX | SET k v EX 9223372036854775807 | SET q v GET EX 100 | TTL q
"""
NUMBERS = f"""
    INCR n | INCR n | DECR n | INCRBY n 10 | DECRBY n 3 | GET n | SET n abc | INCR n | SET n {BIG}
    INCR n | SET n -{BIG + 1} | DECR n | SET n 1 EX 100 | INCR n | TTL n | INCRBY n 1.5
    INCRBY n +1
    INCRBY n 01 | INCRBY n 99999999999999999999 | SET n 05 | INCR n | SET n -0 | INCR n | LPUSH l 1
    INCR l | DECRBY n -{BIG + 1} | INCRBY n -5 | SET n -5 | INCR n | GET n
"""
KEYS = """
    DEL none | SET a 1 | SET b 2 | HSET h f 1 | EXISTS a a b none h | DEL a a none | EXISTS a
    UNLINK b none | TYPE h | TYPE none | RENAME none x | SET a 1 EX 100 | RENAME a b | TTL b | TTL a
    RENAME b b | TTL b | SET c 1 | RENAME h c | TYPE c | EXPIRE c 100 | TTL c | PERSIST c
    PERSIST c
    TTL c | EXPIRE none 1 | EXPIRE c -1 | EXISTS c | EXPIRE b abc | EXPIRE b 10 NX | EXPIRE b 50 XX
    TTL b | EXPIRE b 10 GT | TTL b | EXPIRE b 200 GT | TTL b | EXPIRE b 300 LT | TTL b
    EXPIRE b 20 LT
    TTL b | PERSIST b | EXPIRE b 10 GT | EXPIRE b 10 LT | TTL b | EXPIRE b 1 NX XX
    EXPIRE b 1 GT LT
    EXPIRE b 1 BOGUS | EXPIRE b 9223372036854775807 | PEXPIRE b 100000 | TTL b | PEXPIRE b 0 | TTL b
    DBSIZE | FLUSHDB | DBSIZE | SET z 1 | FLUSHALL SYNC | FLUSHALL BOGUS | DBSIZE | DEL | EXISTS
    TTL
    SELECT 0 | EXPIRE b | PERSIST none | RENAME a
"""
SCANS = r"""
    MSET user:1 a user:2 b item:1 c * d [x] e | HSET h f v | KEYS user:* | KEYS *:1 | KEYS [ui]*
    KEYS [^u]* | KEYS ?ser:? | KEYS \* | KEYS \[x\] | KEYS *e*:* | KEYS nothing | KEYS u*r*:*2*
    KEYS [a-i]* | KEYS [z-a]* | KEYS * | SCAN 0 COUNT 1000 | SCAN 0 MATCH user:* COUNT 1000
    SCAN 0 TYPE hash COUNT 1000 | SCAN abc | SCAN 0 COUNT 0 | SCAN 0 MATCH | SCAN 0 BOGUS 1
    SCAN 0 COUNT x | SCAN 0 TYPE string MATCH *:1 COUNT 1000 | KEYS
"""
HASHES = """
    HSET h a 1 b 2 | HSET h a 3 c 4 | HGET h a | HGET h none | HGET none a | HMGET h a none c
    HMGET none a b | HGETALL h | HGETALL none | HLEN h | HEXISTS h a | HEXISTS h z | HKEYS h
    HVALS h
    HDEL h a a none | HDEL none a | HGETALL h | HDEL h b c | EXISTS h | TYPE h | HSET h a
    HSET h a 1 b
    SET s v | HSET s a 1 | HGET s a | HGETALL s | HDEL s a | HLEN s | HSET d x 1 x 2 | HGETALL d
"""
LISTS = """
    RPUSH l a b c | LPUSH l x y | LRANGE l 0 -1 | LRANGE l 1 2 | LRANGE l -2 -1 | LRANGE l 5 9
    LRANGE l 3 1 | LRANGE l -100 100 | LRANGE l a 1 | LLEN l | LLEN none | LRANGE none 0 -1 | LPOP l
    RPOP l | LPOP l 2 | LPOP l 0 | LPOP l -1 | LPOP l x | RPOP l 10 | EXISTS l | LPOP l | LPOP l 3
    RPOP none | RPOP none 1 | SET s v | RPUSH s 1 | LPOP s | LLEN s | LRANGE s 0 -1 | LPOP l 1 2
    LPOP none 0 | RPUSH l | RPUSH q 1 2 3 | RPOP q 2 | LRANGE q 0 -1
"""
SETS = """
    SADD s a b a c | SADD s a | SCARD s | SISMEMBER s a | SISMEMBER s z | SISMEMBER none a
    SMEMBERS s
    SREM s a a none | SMEMBERS s | SREM s b c | EXISTS s | SMEMBERS none | SCARD none | SREM none a
    SET k v | SADD k a | SMEMBERS k | SREM k a | SCARD k | SADD s | SMEMBERS
"""
SORTED_SETS = """
    ZADD z 1 a 2 b 2 aa -1 c | ZADD z 5 a | ZADD z CH 6 a 7 new | ZRANGE z 0 -1
    ZRANGE z 0 -1 WITHSCORES
    ZRANGE z 0 0 WITHSCORES | ZRANGE z -2 -1 | ZRANGE z 3 1 | ZRANGE z 0 -1 REV
    ZRANGE z 0 1 REV WITHSCORES
    ZADD z NX 100 a 3 fresh | ZSCORE z a | ZSCORE z none | ZSCORE none a
    ZADD z XX 9 a 9 absent | ZCARD z
    ZADD z XX CH 9.5 a | ZADD z GT 1 a | ZADD z LT 1 a | ZSCORE z a | ZADD z NX XX 1 a
    ZADD z NX GT 1 a
    ZADD z abc a | ZADD z 1 | ZADD z 1 a 2 | ZADD z nan a | ZADD z inf i -inf j +5 k 1e3 l .5 m
    ZREM z a a none
    ZRANGE z 0 -1 WITHSCORES | ZREM z b aa c new fresh i j k l m | EXISTS z
    ZRANGE none 0 -1 WITHSCORES
    ZCARD none | ZREM none a | SET s v | ZADD s 1 a | ZRANGE s 0 -1 | ZREM s a | ZRANGE z a 1
    ZRANGE z 0 1 BOGUS
    ZADD d 1 a 2 a | ZRANGE d 0 -1 WITHSCORES | ZADD d GT CH 1 a 3 a | ZADD d 1 x 0 y
    ZRANGE d 0 511 WITHSCORES
    ZADD d GT LT 1 a | ZADD d | ZADD d NX | ZCARD s | ZSCORE s a | ZADD d XX 1 q
    ZADD new XX 1 q | EXISTS new
"""
TRANSACTIONS = """
    MULTI | SET a 1 | INCR a | GET a | HSET a f v | INCR a | EXEC | GET a | EXEC | DISCARD
    MULTI | SET a 9
    DISCARD | GET a | MULTI | MULTI | GET a | EXEC | MULTI | BOGUS | SET a 7 | EXEC | GET a
    MULTI | GET | EXEC
    MULTI | EXEC | WATCH a | MULTI | WATCH b | GET a | EXEC | WATCH a | SET a 8 | MULTI
    SET a 10 | EXEC | GET a
    WATCH a | SET a 8 | UNWATCH | MULTI | SET a 11 | EXEC | GET a | WATCH none | MULTI | SET b 1
    EXEC | WATCH none
    SET none 1 | MULTI | EXEC | WATCH a | DEL a | MULTI | GET b | EXEC | MULTI | RPUSH l 1 2
    LRANGE l 0 -1
    RENAME l m | EXISTS l m | EXPIRE m 100 | TTL m | DEL m | EXISTS m | SET e v EX 100
    FLUSHALL | DBSIZE
    SET x 1 | KEYS * | EXEC | KEYS * | WATCH x | FLUSHALL | MULTI | PING | EXEC | MULTI | PING
    ECHO hi | SELECT 0
    EXEC | WATCH | DISCARD x | MULTI 1
    SET a 1 | WATCH a | RENAME a a | MULTI | GET a | EXEC
    MULTI | SADD s a | SMEMBERS s | ZADD z 1 a 2 b | ZRANGE z 0 -1 WITHSCORES | HSET h f 1
    HGETALL h | LPOP q 2
    LPOP q | EXEC | MULTI | HSET h g 2 | HDEL h f | SREM s a | SADD s c d | ZREM z a
    ZADD z 5 c | RPUSH h 1 | EXEC
    HGETALL h | SMEMBERS s | ZRANGE z 0 -1 WITHSCORES
"""
FAMILIES = {
    name.lower(): value
    for name, value in dict(globals()).items()
    if name.isupper() and isinstance(value, str)
}


def commands(script: str) -> list[list[str]]:
    """Commands between bars and line ends."""
    parts = (part for line in script.splitlines() for part in line.split("|"))
    return [part.split() for part in parts if part.strip()]


def comparable(words: list[Any], answer: Any) -> Any:
    """The answer with its type; sorted where Redis promises no order."""
    if isinstance(answer, list) and str(words[0]).upper() in ("KEYS", "SMEMBERS"):
        answer = sorted(answer)
    if isinstance(answer, list) and str(words[0]).upper() == "SCAN" and len(answer) == 2:
        answer = [answer[0], sorted(answer[1])]
    if isinstance(answer, list):
        return [comparable(words, item) for item in answer]
    return type(answer).__name__, answer


@pytest.fixture(params=[2, 3])
def both(request: pytest.FixtureRequest, wire: Wire, redis_wire: Wire) -> tuple[Wire, Wire]:
    """Our server and Redis, in the same protocol."""
    for connection in (wire, redis_wire):
        connection.ask("HELLO", request.param)
    return wire, redis_wire


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_same_commands_get_the_same_replies(family: str, both: tuple[Wire, Wire]) -> None:
    ours, real = both
    for words in commands(FAMILIES[family]):
        mine, theirs = ours.ask(*words), real.ask(*words)
        assert comparable(words, mine) == comparable(words, theirs), words


def test_any_bytes_are_keys_fields_members_and_values(both: tuple[Wire, Wire]) -> None:
    script: list[list[Any]] = [
        ["SET", BINARY, BINARY],
        ["GET", BINARY],
        ["HSET", b"h" + BINARY, BINARY, b""],
        ["HGETALL", b"h" + BINARY],
        ["SADD", b"s" + BINARY, BINARY, b""],
        ["ZADD", b"z" + BINARY, 1, BINARY],
        ["ZRANGE", b"z" + BINARY, 0, -1, "WITHSCORES"],
        ["RPUSH", b"", BINARY, b""],
        ["LRANGE", b"", 0, -1],
        ["KEYS", b"*\xff*"],
        ["SET", b"", b""],
        ["GET", b""],
        ["APPEND", b"empty", b""],
        ["EXISTS", b"empty"],
    ]
    for words in script:
        mine, theirs = both[0].ask(*words), both[1].ask(*words)
        assert comparable(words, mine) == comparable(words, theirs), words


NAME = st.sampled_from(["a", "b", "c"])
PART = st.sampled_from(["x", "y", "1", "2", "-3", ""])
SCORE = st.sampled_from(["1", "2", "-1.5", "inf", "bad"])
PLACE = st.sampled_from(["0", "1", "-1", "-2", "5"])


def _command(name: str, *parts: st.SearchStrategy[str]) -> st.SearchStrategy[list[str]]:
    return st.tuples(*parts).map(lambda chosen: [name, *chosen])


COMMAND = st.one_of(
    *(
        _command(name, NAME, PART)
        for name in ("SET", "APPEND", "SETNX", "SADD", "SREM", "SISMEMBER")
    ),
    *(_command(name, NAME, PART) for name in ("RPUSH", "LPUSH", "HGET", "HDEL", "ZREM", "ZSCORE")),
    *(_command(name, NAME, PART, PART) for name in ("HSET", "HMGET", "RPUSH", "SADD")),
    *(_command(name, NAME) for name in ("GET", "DEL", "INCR", "TYPE", "HGETALL", "LPOP", "RPOP")),
    *(_command(name, NAME) for name in ("SMEMBERS", "LLEN", "TTL", "PERSIST", "WATCH")),
    *(_command(name, NAME, NAME) for name in ("RENAME", "EXISTS", "MGET", "DEL")),
    *(_command(name, NAME, PLACE, PLACE) for name in ("LRANGE", "ZRANGE")),
    _command("ZADD", NAME, SCORE, PART),
    _command("ZADD", NAME, st.sampled_from(["NX", "XX", "GT", "CH"]), SCORE, PART),
    _command("EXPIRE", NAME, st.sampled_from(["100", "-1"])),
    _command("LPOP", NAME, st.sampled_from(["0", "1", "9"])),
    *(st.just([name]) for name in ("MULTI", "MULTI", "EXEC", "EXEC", "EXEC", "DISCARD", "DBSIZE")),
)


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(script=st.lists(COMMAND, max_size=40))
def test_whatever_is_asked_in_whatever_order_redis_would_say_the_same(
    script: list[list[str]], shared: RunningServer, redis_port: int
) -> None:
    with Wire.tcp(shared.port) as ours, Wire.tcp(redis_port) as real:
        for words in [["FLUSHALL"], *script]:
            mine, theirs = ours.ask(*words), real.ask(*words)
            if words == ["EXEC"]:
                # sets inside have no order
                assert repr(_sorted(mine)) == repr(_sorted(theirs))
            else:
                assert comparable(words, mine) == comparable(words, theirs), words


def _sorted(answer: Any) -> Any:
    if isinstance(answer, list):
        return [sorted(i, key=repr) if isinstance(i, list) else i for i in answer]
    return answer
