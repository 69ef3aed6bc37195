"""The examples do what they say, and say what is wrong."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.door_fixture import ROOT, Child, folders

transformers = pytest.importorskip("transformers")

from tests.transformers_fixture import make  # noqa: E402

TEMPLATE = "{% for m in messages %}<s>{{ m.role }} {{ m.content }}</s>{% endfor %}<s>assistant "


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A tiny chat model of bytes, in a folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("model")
    words = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    made = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    made.add_special_tokens(words[:3])
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="</s>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    make(vocab_size=len(words), eos_token_id=2).save_pretrained(folder)
    return folder


@pytest.fixture
def environ(tmp_path):
    """Of processes that find the host of this test, or none."""
    with folders() as (socket, arena):
        config = tmp_path / "kvtier.toml"
        config.write_text(f'run_dir = "{socket.parent}"\n')
        yield {"socket": socket, "arena": arena, "environ": os.environ | {"KVTIER_CONFIG": str(config)}}


def run(example, *args, environ, says=""):
    return subprocess.run(
        [sys.executable, f"examples/{example}.py", *map(str, args)],
        input=says,
        env=environ["environ"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def numbers(text, pattern):
    return [tuple(int(n.replace(",", "")) for n in found) for found in re.findall(pattern, text)]


def test_a_chat_keeps_what_it_has_and_another_process_loads_it(model, environ):
    child = Child("host", str(environ["socket"]), str(environ["arena"]), str(16 << 20))
    try:
        child.says()
        first = run("transformers_chat", model, "LICENSE", environ=environ, says="one\ntwo\n\n")
        assert first.returncode == 0, first.stderr
        counts = r"([\d,]+) tokens kept, ([\d,]+) loaded, ([\d,]+) computed"
        (nothing, none, computed), (kept, _, rest) = numbers(first.stdout, counts)
        assert (nothing, none) == (0, 0)
        assert kept >= computed > 10_000 > rest
        again = run("transformers_chat", model, "LICENSE", environ=environ, says="one\n")
        ((_, loaded, missing),) = numbers(again.stdout, counts)
        assert loaded == (computed - 1) // 64 * 64
        assert missing == computed - loaded
        # Same answer, loaded or computed.
        assert again.stdout.split("\n(")[0] == first.stdout.split("\n(")[0]
    finally:
        child.kill()


def test_a_batch_loads_the_document_that_its_prompts_share(model, environ):
    child = Child("host", str(environ["socket"]), str(environ["arena"]), str(16 << 20))
    try:
        child.says()
        args = (model, "examples/any_engine.py", "What?", "And what is this for?", "Why is it so")
        counts = r"([\d,]+) tokens loaded, ([\d,]+) computed"
        first, again = (run("transformers_batch", *args, environ=environ) for _ in range(2))
        assert first.returncode == again.returncode == 0, first.stderr + again.stderr
        assert {loaded for loaded, _ in numbers(first.stdout, counts)} == {0}
        assert all(loaded > 20 * computed for loaded, computed in numbers(again.stdout, counts))
        text = [re.sub(r"\(.*\)", "", done.stdout) for done in (first, again)]
        assert text[0] == text[1]
    finally:
        child.kill()


def test_a_chat_without_a_host_goes_on_in_its_own_process(model, environ):
    done = run("transformers_chat", model, environ=environ, says="one\ntwo\n")
    assert done.returncode == 0, done.stderr
    assert "going on without" in done.stdout
    (_, (kept, _, _)) = numbers(done.stdout, r"([\d,]+) tokens kept, ([\d,]+) loaded, ([\d,]+) computed")
    assert kept > 1000


@pytest.mark.parametrize(
    ("example", "args", "says"),
    [
        ("transformers_chat", (), "MODEL"),
        ("transformers_batch", ("here",), "MODEL"),
        ("transformers_chat", ("no/such/model", "README.md"), "cannot read no/such/model"),
        ("transformers_chat", ("{model}", "no_such_file"), "no_such_file"),
        ("transformers_batch", ("{model}", "no_such_file", "why"), "no_such_file"),
        ("transformers_batch", ("{model}", "LICENSE", "why"), "kvtier up"),
    ],
)
def test_what_cannot_work_is_said_in_a_sentence(model, environ, example, args, says):
    environ["environ"]["HF_HUB_OFFLINE"] = "1"
    done = run(example, *(arg.format(model=model) for arg in args), environ=environ)
    assert done.returncode == 1
    assert says in done.stderr
    assert "Traceback" not in done.stderr
