"""The run folder of a hurt and recovered run tells much about its samples, and nothing of their text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pretrain
import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from lightning_sentinel.config import build
from lightning_sentinel.journal import read_journal

RUN = 24  # bytes in a row that count as text
BYTES = 256  # token ids below this are bytes
LISTS = re.compile(rb"\d+(?:\s*,\s*\d+){%d,}" % (RUN - 1))


@pytest.fixture(autouse=True)
def fresh_hydra() -> Iterator[None]:
    GlobalHydra.instance().clear()
    yield
    GlobalHydra.instance().clear()


def pieces(text: bytes) -> Iterator[bytes]:
    """All runs of 24 bytes; not those of indentation and rules, which are no one's words."""
    for start in range(len(text) - RUN + 1):
        piece = text[start : start + RUN]
        if len(set(piece)) >= 8:
            yield piece


def readings(content: bytes) -> Iterator[bytes]:
    """A file's bytes, with the escapes of JSON and HTML undone, and its lists of numbers as token ids."""
    yield content
    text = content.decode("utf-8", "replace")
    for escape, plain in {"\\n": "\n", '\\"': '"', "&#39;": "'", "&#34;": '"', "&lt;": "<", "&gt;": ">"}.items():
        text = text.replace(escape, plain)
    yield text.replace("&amp;", "&").encode()
    for found in LISTS.findall(content):
        numbers = [int(number) for number in found.split(b",")]
        yield bytes(number if number < BYTES else 0 for number in numbers)


def test_no_text_of_a_sample_is_in_the_run_folder(tmp_path: Path) -> None:
    overrides = [
        *(f"run_dir={tmp_path}", "model=tiny", "data=text_tiny", "policy=recover", "trainer.max_steps=16"),
        *("faults=[out_of_range_token,nan_forward]", "faults.out_of_range_token.step=6", "faults.nan_forward.step=10"),
        *("trainer.enable_progress_bar=false", "trainer.val_check_interval=8", "trainer.limit_val_batches=1"),
    ]
    with initialize_config_dir(str(pretrain.CONFIGS), version_base="1.3"):
        cfg = compose("config", overrides)
    OmegaConf.resolve(cfg.data)
    pretrain.pretrain(cfg)

    texts = {}
    for source in build(cfg.data, "data").train_sources:
        for i in range(len(source)):
            tokens = source.sample(i)["input_ids"].tolist()
            texts[source.sample_id(i)] = bytes(token if token < BYTES else 0 for token in tokens)
    events = read_journal(tmp_path)
    drawn = {name for event in events if event["event"] == "step" for name in event["sample_ids"]}
    assert len(drawn) >= 30  # the ids are there ...
    assert drawn <= set(texts)
    assert {event["step"] for event in events if event["event"] == "incident.opened"} == {6, 10}
    secret = {piece for text in texts.values() for piece in pieces(text)}
    assert len(secret) > 10_000

    files = [path for path in tmp_path.rglob("*") if path.is_file() and "checkpoints" not in path.parts]
    names = {path.name for path in files}
    assert {"rank-00000.jsonl", "summary.json", "metrics.csv"} <= names
    for path in files:
        for content in readings(path.read_bytes()):
            told = [piece for piece in pieces(content) if piece in secret]
            assert told == [], f"{path.relative_to(tmp_path)} holds {told[:3]}"  # ... and no text


def test_a_text_that_was_written_would_be_found() -> None:
    text = b"def spam(eggs):\n    return 'ham' and eggs"
    secret = set(pieces(text))
    for content in (json.dumps({"text": text.decode()}).encode(), str(list(text)).encode(), b"x" + text):
        assert any(piece in secret for content in readings(content) for piece in pieces(content))
