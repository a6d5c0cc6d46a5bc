"""Public models by name: exact counts under every convention, published counts, names."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from perfmodel import CatalogueEntry, catalogue
from perfmodel.architecture import Architecture, ParameterConvention
from perfmodel.errors import PerfmodelError

WITH_EMBEDDING = ParameterConvention.WITH_EMBEDDING
WITHOUT_EMBEDDING = ParameterConvention.WITHOUT_EMBEDDING

# Total and active with embedding and head, active without the embedding, active and total
# without both. Counted by a formula that is not ours, and for most of them tensor by tensor.
# fmt: off
SPARSE = {
    "Mixtral-8x7B": (46702792704, 12879925248, 12748853248, 12617781248, 46440648704),
    "Mixtral-8x22B": (140620634112, 39152031744, 38955423744, 38758815744, 140227418112),
    "DeepSeek-V2": (235741434880, 21375800320, 20851512320, 20327224320, 234692858880),
    "DeepSeek-V2-Lite": (15706484224, 2661150208, 2451435008, 2241719808, 15287053824),
    "DeepSeek-V3": (671026419200, 37552297472, 36625618432, 35698939392, 669173061120),
    "Qwen1.5-MoE-A2.7B": (14315784192, 2689173504, 2378008576, 2066843648, 13693454336),
    "Qwen2-57B-A14B": (57408658944, 14249270784, 13704732160, 13160193536, 56319581696),
    "Qwen3-30B-A3B": (30532122624, 3353032704, 3041867776, 2730702848, 29909792768),
    "Qwen3-235B-A22B": (235093634560, 22190763520, 21568433664, 20946103808, 233848974848),
    "OLMoE-1B-7B": (6919161856, 1282017280, 1178994688, 1075972096, 6713116672),
    "gpt-oss-20b": (20914757184, 4187440704, 3608307264, 3029173824, 19756490304),
    "gpt-oss-120b": (116829156672, 5711982912, 5132849472, 4553716032, 115670889792),
    "Kimi-K2": (1026408232448, 32861500928, 31687095808, 30512690688, 1024059422208),
    "Moonlight-16B-A3B": (15960110208, 2914776192, 2579231872, 2243687552, 15289021568),
    "GLM-4.5": (352797829024, 33632266144, 32856319904, 32080373664, 351245936544),
    "GLM-4.5-Air": (106852251264, 13424129664, 12803372672, 12182615680, 105610737280),
    "Llama-4-Scout": (107769861120, 17172894720, 16138408960, 15103923200, 105700889600),
    "Llama-4-Maverick": (400711848960, 17184691200, 16150205440, 15115719680, 398642877440),
    "DBRX": (131596523520, 36469708800, 35853146112, 35236583424, 130363398144),
    "Grok-1": (315684820992, 83756587008, 82951280640, 82951280640, 314879514624),
    "Phi-3.5-MoE": (41873153344, 6640999744, 6509665600, 6378331456, 41610485056),
    "ERNIE-4.5-21B-A3B": (21825437888, 3352150208, 3087384768, 3087384768, 21560672448),
    "ERNIE-4.5-300B-A47B": (298636913856, 47079337152, 46232087744, 46232087744, 297789664448),
    "dots.llm1": (142774381696, 14016588928, 13393734784, 12770880640, 141528673408),
    "Ling-lite": (16801974272, 2753153024, 2494154752, 2235156480, 16283977728),
    "Ling-plus": (290602910976, 29004170496, 28324300032, 27644429568, 289243170048),
    "Snowflake-Arctic": (478584608768, 17318647808, 17089271808, 16859895808, 478125856768),
    "Hunyuan-Large": (388963549440, 51584221440, 50758467840, 50758467840, 388137795840),
    "MiniMax-Text-01": (456089655296, 48403306496, 47174113280, 45944920064, 453631268864),
    "MiniMax-M2.5": (228689764864, 11030553088, 10415956480, 9801359872, 227460571648),
}
DENSE = {
    "Llama-2-7B": 6738415616, "Llama-2-13B": 13015864320, "Llama-2-70B": 68976648192,
    "Llama-3-8B": 8030261248, "Llama-3-70B": 70553706496, "Llama-3-405B": 405853388800,
    "Qwen2.5-0.5B": 494032768, "Qwen2.5-1.5B": 1543714304, "Qwen2.5-3B": 3085938688,
    "Qwen2.5-7B": 7615616512, "Qwen2.5-14B": 14770033664, "Qwen2.5-32B": 32763876352,
    "Qwen2.5-72B": 72706203648, "Qwen3-0.6B": 596049920, "Qwen3-1.7B": 1720574976,
    "Qwen3-4B": 4022468096, "Qwen3-8B": 8190735360, "Qwen3-14B": 14768307200,
    "Qwen3-32B": 32762123264,
}
# fmt: on


def counts(a: Architecture) -> tuple[int, ...]:
    return (
        a.n_total(WITH_EMBEDDING),
        a.n_active(WITH_EMBEDDING),
        a.n_active(WITHOUT_EMBEDDING),
        a.n_active(),
        a.n_total(),
    )


@pytest.mark.parametrize("name", SPARSE)
def test_sparse_models_to_the_parameter(name: str) -> None:
    a = catalogue[name]
    total, active, without_embedding, *rest = SPARSE[name]
    if a.tied_embeddings:  # the table leaves the one matrix out, we count it as the head
        assert without_embedding == rest[0]
        without_embedding += a.vocab_size * a.d_model
    assert counts(a) == (total, active, without_embedding, *rest)


def test_jamba_to_the_parameter() -> None:
    """A hybrid: its Mamba layers are parameters of the model with a reason, and no more."""
    a = catalogue["Jamba-v0.1"]
    assert a.n_total(WITH_EMBEDDING) == 51_570_323_328
    assert a.n_active(WITH_EMBEDDING) == 12_110_311_296
    assert a.extra is not None
    assert "Mamba" in a.extra.reason


@pytest.mark.parametrize("name", DENSE)
def test_dense_models_to_the_parameter(name: str) -> None:
    assert catalogue[name].n_total(WITH_EMBEDDING) == DENSE[name]


def test_the_table_is_that_of_the_collected_configurations(shared_data: Path) -> None:
    models = yaml.safe_load((shared_data / "moe_models.yaml").read_text("utf-8"))["models"]
    assert len(models) == 31
    for name, model in models.items():
        if "recomputed" in model:
            r = model["recomputed"]
            keys = ("total", "active", "active_no_emb", "active_no_emb_head", "total_no_emb_head")
            assert SPARSE[catalogue[name].name] == tuple(r[key] for key in keys)
        else:
            assert catalogue[name].n_total(WITH_EMBEDDING) == model["hf_meta_total"]


def test_published_totals_are_within_their_rounding() -> None:
    """Largest where the name rounds ("7B", "1T"), or leaves out what is not text."""
    off = {}
    for name in catalogue:
        entry = catalogue.entry(name)
        if entry.published is not None and entry.published.total is not None:
            count = entry.architecture.n_total(WITH_EMBEDDING)
            off[name] = count / entry.published.total - 1
    assert {name for name, error in off.items() if abs(error) > 0.0125} == {
        "DeepSeek-V2-Lite",
        "Kimi-K2",
        "Llama-2-7B",
        "Llama-2-70B",
        "Megatron-GPT-1.7B",
        "Qwen3-30B-A3B",
    }
    assert max(map(abs, off.values())) < 0.04


def test_published_active_counts_follow_one_of_the_three_conventions() -> None:
    for name in catalogue:
        entry = catalogue.entry(name)
        if entry.published is not None and entry.published.active is not None:
            a, published = entry.architecture, entry.published.active
            assert min(abs(a.n_active(c) / published - 1) for c in ParameterConvention) < 0.05, name


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("1.7B", "1.7"),
        ("3.6B", "3.6"),
        ("7.5B", "7.5"),
        ("18.4B", "18.4"),
        ("39.1B", "39.1"),
        ("76.1B", "76.1"),
        ("145.6B", "145.6"),
        ("310.1B", "310.1"),
        ("530B", "529.6"),
        ("1T", "1008.0"),
    ],
)
def test_gpt_shapes_by_the_formula_of_their_paper(name: str, billions: str) -> None:
    """Narayanan et al. 2021, equation 2; it leaves out the last norm."""
    a = catalogue[f"Megatron-GPT-{name}"]
    h, layers, vocabulary, sequence = a.d_model, a.n_layers, a.vocab_size, a.learned_positions
    formula = 12 * layers * h * h + 13 * layers * h + (vocabulary + sequence) * h
    assert a.n_total(WITH_EMBEDDING) == formula + 2 * h
    printed = f"{a.n_total(WITH_EMBEDDING) / 1e9:.1f}"
    assert abs(float(printed) - float(billions)) <= 0.1 * (1 + 1e-9)


def test_multi_token_prediction_is_apart() -> None:
    """DeepSeek states 11.5B for the module: a layer and a projection, embedding and head shared."""
    a = catalogue["DeepSeek-V3"]
    assert a.mtp_parameters == 11_610_068_224
    assert a.mtp_parameters / 11.5e9 == pytest.approx(1, abs=0.01)
    assert catalogue["Kimi-K2"].mtp_parameters == 0


# ---------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("deepseek-v3", "DeepSeek-V3"),
        ("DeepSeekV3", "DeepSeek-V3"),
        ("GPT OSS 120B", "gpt-oss-120b"),
        ("qwen3_235b_a22b", "Qwen3-235B-A22B"),
        ("Kimi-K2-Instruct", "Kimi-K2"),
        ("llama 3.1 405b", "Llama-3-405B"),
        ("GPT-3", "GPT-3-175B"),
    ],
)
def test_a_name_is_found_in_any_spelling(name: str, found: str) -> None:
    assert name in catalogue
    assert catalogue[name].name == found


@pytest.mark.parametrize(
    ("name", "says"), [("DeepSeek-V33", "did you mean DeepSeek-V3"), ("", "mosaic models")]
)
def test_an_unknown_name_is_one_sentence_with_the_nearest(name: str, says: str) -> None:
    assert name not in catalogue
    with pytest.raises(PerfmodelError, match=says) as caught:
        _ = catalogue[name]
    assert "\n" not in str(caught.value)


@given(st.text(max_size=200))
def test_any_text_is_a_model_or_an_error_of_one_line(name: str) -> None:
    if name in catalogue:
        assert catalogue[name].name in catalogue
        return
    with pytest.raises(PerfmodelError) as caught:
        _ = catalogue[name]
    assert len(str(caught.value)) < 300


def test_every_name_and_alias_leads_to_one_model() -> None:
    spelled: dict[str, str] = {}
    for name in catalogue:
        for alias in (name, *catalogue.entry(name).aliases):
            key = "".join(filter(str.isalnum, alias.casefold()))
            assert spelled.setdefault(key, name) == name
            assert catalogue[alias].name == name
    assert len(catalogue) == len(set(catalogue)) >= 60
    assert 5 not in catalogue


def test_the_table_of_the_documents_is_that_of_the_catalogue() -> None:
    page = Path(__file__).parents[2] / "docs" / "theory" / "architecture.md"
    table = page.read_text("utf-8").split("<!-- catalogue -->")[1].strip().splitlines()[2:]
    expected = []
    for name, a in catalogue.items():
        found = [a.n_total(WITH_EMBEDDING), *(a.n_active(c) for c in ParameterConvention)]
        found.append(a.flops_per_token("megatron", 4096))
        expected.append(f"| {name} | {' | '.join(f'{n / 1e9:.3f}' for n in found)} |")
    assert table == expected


def test_every_model_says_where_it_is_from() -> None:
    for name in catalogue:
        entry: CatalogueEntry = catalogue.entry(name)
        assert len(entry.source) > 10
        assert entry.published is None or entry.published.source
