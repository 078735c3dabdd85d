"""Images and embeddings on their way to an engine, and what no engine gets."""

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import torch
from vllm import SamplingParams
from vllm.config import ModelConfig
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.inputs import (
    MultiModalFeatureSpec,
    MultiModalFieldConfig,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.v1.serial_utils import CUSTOM_TYPE_CLOUDPICKLE, CUSTOM_TYPE_PICKLE

from dynamo_lite.protocol.errors import Refused
from dynamo_lite.protocol.generate import GenerateRequest
from dynamo_lite.request_plane.migrating_request import MigrationPlan
from dynamo_lite.vllm import inputs
from dynamo_lite.vllm.requests import generate_request, generation
from tests.vllm.without_engines.test_requests import MODEL, core_request

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8]
HIDDEN = 4
GREEDY = {"temperature": 0.0, "max_tokens": 9}


def model(*, media: bool = True, embeddings: bool = True) -> ModelConfig:
    extra = {
        "supports_multimodal_inputs": media,
        "enable_prompt_embeds": embeddings,
        "get_inputs_embeds_size": lambda: HIDDEN,
    }
    return cast("ModelConfig", SimpleNamespace(**{**vars(MODEL), **extra}))


def feature(offset: int, length: int, seed: int = 1, **changes: Any) -> MultiModalFeatureSpec:
    pixels = torch.randn(3, 16, 16, generator=torch.Generator().manual_seed(seed)).bfloat16()
    field = MultiModalFieldConfig.batched("image").field
    item = MultiModalKwargsItem({"pixel_values": MultiModalFieldElem(pixels, field)})
    fields: dict[str, Any] = {
        "data": item,
        "modality": "image",
        "identifier": f"hash-{seed}",
        "mm_position": PlaceholderRange(offset, length),
    }
    return MultiModalFeatureSpec(**(fields | changes))


def sent(**changes: Any) -> GenerateRequest:
    fields = {"prompt_token_ids": PROMPT} | changes
    message, _ = generate_request(core_request(SamplingParams(**GREEDY), **fields), None)
    # What arrives is what the message's bytes say.
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=GenerateRequest)


def test_features_arrive_as_they_were():
    mask = torch.tensor([True, False, True])
    given = [feature(1, 2), feature(4, 3, 2, mm_position=PlaceholderRange(4, 3, mask))]
    got = generation(sent(mm_features=given), model(), most_embeds={"image": 2})
    assert got.prompt_token_ids == PROMPT and got.prompt_embeds is None
    assert got.mm_features is not None
    for there, here in zip(got.mm_features, given, strict=True):
        assert (there.identifier, there.modality) == (here.identifier, "image")
        assert there.mm_position == here.mm_position
        assert there.data is not None and here.data is not None
        assert torch.equal(there.data["pixel_values"].data, here.data["pixel_values"].data)
    moved = msgspec.structs.replace(sent(mm_features=given), output_token_ids=[9])
    assert generation(moved, model(), most_embeds={"image": 2}).prompt_token_ids == [*PROMPT, 9]


@pytest.mark.parametrize("mixed", [False, True])
def test_embeddings_arrive_as_they_were_and_are_repeated_from_their_start(mixed: bool):
    given = torch.randn(8, HIDDEN)
    where = {"prompt_is_token_ids": [True] * 3 + [False] * 5} if mixed else {}
    tokens = {"prompt_token_ids": PROMPT if mixed else None}
    request = core_request(SamplingParams(**GREEDY), prompt_embeds=given, **tokens, **where)
    message, plan = generate_request(request, None)
    assert plan == MigrationPlan(replay=True) and len(message.prompt_token_ids) == 8
    got = generation(message, model())
    assert got.prompt_token_ids == (PROMPT if mixed else [0] * 8) and got.mm_features is None
    assert got.prompt_embeds is not None and torch.equal(got.prompt_embeds, given)
    assert got.prompt_is_token_ids == where.get("prompt_is_token_ids", [False] * 8)
    moved = msgspec.structs.replace(message, output_token_ids=[9])
    with pytest.raises(Refused, match="embeddings"):
        generation(moved, model())
    text, plan = generate_request(core_request(SamplingParams(**GREEDY)), None)
    assert text.inputs is None and plan == MigrationPlan()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mm_features": [feature(6, 3)]}, "image at 6 to 9 of 8"),
        ({"mm_features": [feature(3, 0)]}, "image at 3 to 3"),
        ({"mm_features": [feature(4, 2), feature(3, 2)]}, "image at 3"),
        ({"mm_features": [feature(0, 2, data=None)]}, "without data"),
        ({"mm_features": [feature(0, 6)]}, "6 embeddings.*at most 5"),
        ({"mm_features": [feature(0, 1, modality="audio")]}, "audio of 1 .* at most 0"),
        (
            {"mm_features": [feature(0, 3, mm_position=PlaceholderRange(0, 3, torch.ones(4)))]},
            "mask",
        ),
        ({"prompt_embeds": torch.randn(7, HIDDEN)}, r"needs.*\[8, 4\]"),
        ({"prompt_embeds": torch.ones(8, HIDDEN, dtype=torch.int64)}, "floating"),
        (
            {"prompt_embeds": torch.randn(8, HIDDEN), "prompt_is_token_ids": [True]},
            "another length",
        ),
    ],
)
def test_what_would_break_a_step_is_refused(changes: dict[str, Any], said: str):
    with pytest.raises(Refused, match=said):
        generation(sent(**changes), model(), most_embeds={"image": 5})


def test_placeholders_may_be_outside_of_the_vocabulary_and_text_may_not():
    """That of MODEL has 100 tokens."""
    limits, prompt = {"image": 2}, [1, 900, 900, 4]
    image = {"mm_features": [feature(1, 2)]}
    got = generation(sent(prompt_token_ids=prompt, **image), model(), most_embeds=limits)
    assert got.prompt_token_ids == prompt
    mixed = {"prompt_embeds": torch.ones(4, HIDDEN)}
    mask = [True, False, False, True]
    made = sent(prompt_token_ids=prompt, prompt_is_token_ids=mask, **mixed)
    assert generation(made, model()).prompt_token_ids == prompt
    with pytest.raises(Refused, match="token id 900"):
        generation(sent(prompt_token_ids=[1, 5, 5, 900], **image), model(), most_embeds=limits)


def test_a_model_gets_what_it_takes():
    image, embedded = sent(mm_features=[feature(0, 2)]), sent(prompt_embeds=torch.ones(8, HIDDEN))
    with pytest.raises(Refused, match="text only"):
        generation(image, model(media=False), most_embeds={"image": 5})
    with pytest.raises(Refused, match="enable-prompt-embeds"):
        generation(embedded, model(embeddings=False))


def test_too_many_bytes_are_the_clients_mistake(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(inputs, "MAX_INPUT_BYTES", 1000)
    with pytest.raises(VLLMValidationError, match="at most 1000 are served"):
        sent(mm_features=[feature(0, 2)])


def test_nothing_is_unpickled_even_where_vllm_would(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    whole = msgspec.msgpack.decode(sent(mm_features=[feature(0, 2)]).inputs or b"")
    for code in (CUSTOM_TYPE_PICKLE, CUSTOM_TYPE_CLOUDPICKLE):
        whole[0][0]["data"]["pixel_values"]["data"] = msgspec.msgpack.Ext(code, b"cos\nsystem\n.")
        with pytest.raises(Refused, match="extension type"):
            inputs.inputs_from_bytes(msgspec.msgpack.encode(whole), 8, model(), {"image": 5})


@pytest.mark.parametrize(
    "field",
    [["shared", {}], ["__class__", {}], ["mro", {}], "x", 7, ["flat", {"slices": "x", "dim": 0}]],
    ids=str,
)
def test_malformed_features_are_refused(field: Any):
    whole = msgspec.msgpack.decode(sent(mm_features=[feature(0, 2)]).inputs or b"")
    whole[0][0]["data"]["pixel_values"]["field"] = field
    with pytest.raises(Refused, match="malformed"):
        inputs.inputs_from_bytes(msgspec.msgpack.encode(whole), 8, model(), {"image": 5})
