"""The Python of pages about transformers, as it stands, on a tiny model and a host in another process."""

from __future__ import annotations

import pytest
import torch

import kvtier
from tests.examples_fixture import ROOT, found_host, run_page
from tests.integration.test_examples import WITH_A_MODEL

transformers = pytest.importorskip("transformers")

from kvtier.connectors.transformers import PagedCache, pages_for, prefill, space_for  # noqa: E402
from kvtier.flow import Flow  # noqa: E402
from kvtier.pruning import Pruner, h2o, watched  # noqa: E402
from tests.engines.test_transformers_examples import TEMPLATE  # noqa: E402
from tests.transformers_fixture import make, plain, words  # noqa: E402

SAME = {"model_name": "SmolLM2-135M-Instruct", "revision": "q4_1"}


@pytest.fixture(autouse=True)
def host(monkeypatch, tmp_path):
    """What `kvtier.connect()` finds."""
    with found_host(tmp_path) as config:
        monkeypatch.setenv("KVTIER_CONFIG", str(config))
        yield


@pytest.fixture(scope="module")
def model():
    return make()


@pytest.fixture(scope="module")
def tokenizer():
    """Of bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    known = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    made = Tokenizer(models.BPE({word: i for i, word in enumerate(known)}, []))
    made.add_special_tokens(known[:3])
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="</s>")
    fast.chat_template = TEMPLATE
    return fast


def test_each_page_has_a_test():
    here = {value for name, value in globals().items() if name.startswith("PAGE_")}
    assert here == WITH_A_MODEL


PAGE_QUICK_START = "docs/quickstart.md"


def test_the_quick_start_loads_in_its_second_run(tokenizer, tmp_path, capsys, monkeypatch):
    make(vocab_size=len(tokenizer), eos_token_id=2).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    monkeypatch.chdir(ROOT)
    prompt = len((ROOT / "LICENSE").read_bytes()) + len("\nWhat may I do with this?")
    stored = (prompt - 1) // 64 * 64
    for loaded in (0, stored):
        run_page(PAGE_QUICK_START, {}, name=f"HuggingFaceTB/SmolLM2-135M-Instruct -> {tmp_path}")
        assert capsys.readouterr().out.splitlines()[-1] == f"0 {loaded} {prompt - loaded}"


PAGE_TRANSFORMERS = "docs/transformers.md"


def test_a_conversation_and_a_batch(tokenizer):
    says = iter(["What is kept of a conversation?" * 3, "And then?", ""])
    names = {
        "model": make(vocab_size=len(tokenizer), eos_token_id=2),
        "tokenizer": tokenizer,
        "messages": [],
        "prompts": [f"{'A document that several ask about. ' * 4}{question}" for question in ("What?", "Why so?")],
        "input": lambda _: next(says),
    }
    run_page(PAGE_TRANSFORMERS, names)
    assert len(names["messages"]) == 4
    assert names["chat"].kept > 100, "the second turn goes on with the first"
    assert [start.loaded for start in names["batch"].starts] == [0, 0]
    again = run_page(PAGE_TRANSFORMERS, names | {"input": lambda _: "", "messages": []})
    assert all(start.loaded >= 64 for start in again["batch"].starts)


PAGE_FLOW = "docs/flow.md"


def test_a_flow_shares_and_goes_on_elsewhere(model):
    system, question = words(0, 130), words(1, 60)
    cache = kvtier.connect()
    names = {
        "model": model,
        "torch": torch,
        "cache": cache,
        "space": space_for(cache, model, **SAME),
        "space_for": space_for,
        "system_ids": system,
        "ids": torch.cat([system, question]),
        "question": question,
    }
    run_page(PAGE_FLOW, names)
    assert names["done"].result().refused == ""
    assert names["more"].shape[1] == 190 + 200 + 60 + 200
    assert Flow(model).resume(names["archive"], names["name"], wait=10.0)
    cache.close()


PAGE_PAGES = "docs/pages.md"


def test_pages_are_shared_and_loaded_into(model):
    cache = kvtier.connect()
    space = space_for(cache, model, **SAME)
    token_ids = words(3, 256).tolist()
    begun = prefill(model, torch.tensor(token_ids), space)
    begun.saved.result(30.0)
    spec = space.keyspace.spec
    names = {
        "model": model,
        "space": space,
        "spec": spec,
        "PagedCache": PagedCache,
        "system_ids": words(0, 64)[None],
        "question_ids": torch.stack([words(seed, 5) for seed in range(100)]),
        "layers": [(torch.randn(128, 2, 16), torch.randn(128, 2, 16)) for _ in range(spec.layers)],
        "token_ids": token_ids,
        "other_token_ids": [*token_ids[:100], *range(1, 50)],
    }
    with torch.inference_mode():
        run_page(PAGE_PAGES, names, room="1 << 30 -> 1 << 24")
    assert names["c"].tokens == 96
    assert names["hit"].verified == 256
    names["hit"].close()
    cache.close()


PAGE_PRUNING = "docs/pruning.md"


def test_pruning_keeps_its_share(model):
    names = run_page(PAGE_PRUNING, {"model": model, "ids": words(0, 600)[None]})
    assert len(names["answer"]) == 500
    held = names["cache"].get_seq_length()
    assert 0.69 * 1000 < held < 0.7 * 1100 + 100


PAGE_TUTORIAL_LAYERS = "docs/tutorial/layers.md"
PAGE_TUTORIAL_PRUNING = "docs/tutorial/pruning.md"
PAGE_TUTORIAL_SHARING = "docs/tutorial/sharing.md"


def test_what_the_tutorial_ends_with(model):
    cache = kvtier.connect()
    run_page(PAGE_TUTORIAL_LAYERS, {"space_for": space_for, "cache": cache, "model": model})
    run_page(PAGE_TUTORIAL_PRUNING, {"Pruner": Pruner, "h2o": h2o, "watched": watched, "model": model, "layers": 3})
    names = {
        "PagedCache": PagedCache,
        "pages_for": pages_for,
        "space_for": space_for,
        "prefill": prefill,
        "kvtier": kvtier,
        "model": model,
        "cache": cache,
        "ids": words(0, 150),
        "system_ids": words(1, 64)[None],
    }
    with torch.inference_mode():
        run_page(PAGE_TUTORIAL_SHARING, names, room="1 << 30 -> 1 << 24")
    assert plain(model, words(1, 64)[None], 1)
    cache.close()
