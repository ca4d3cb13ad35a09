"""Settings: what is rejected, in which words, and what follows from those that are given."""

import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from rejections import rejects

from train.config import PrepareConfig, TrainConfig, make_plan
from train.run import compose as cli

CONF = Path(__file__).parent.parent.parent / "conf"
GIVEN = ["run_dir=r", "data.path=d", "max_steps=10", "global_batch_size=32"]


def options(group):
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def load(*overrides):
    return cli.load_config(TrainConfig, [*GIVEN, *overrides])


@pytest.mark.slow
@pytest.mark.parametrize(
    "group", ["task", "data", "optim", "backend", "parallel", "instance", "model"]
)
def test_every_option_of_every_group_composes_to_settings_of_its_own(group):
    of_data, composed = {"shards": "mlm", "squad": "qa"}, {}  # the other data is for classify
    for option in options(group):
        extra = []
        if option == "pretrained":
            extra = ["model.pretrained=some/where"]
        if group == "task" and option != "mlm":
            extra = ["data=records"]
        if group == "data":
            extra = [f"task={of_data.get(option.split('_')[0], 'classify')}"]
        composed[option] = repr(getattr(load(f"{group}={option}", *extra), group))
    assert len(set(composed.values())) == len(composed)


def test_a_composition_leaves_no_trace_in_the_next():
    before = load("optim=lamb")
    changed = load("optim=lamb", "seed=7", "optim.betas=[0.5,0.5]")
    changed.optim.betas.append(0.5)
    assert changed.seed == 7 and load("optim=lamb") == before
    assert load("optim=lamb", "optim={}") == before
    # of several values the last counts
    given = [
        "max_steps=1",
        "max_steps=2",
        "seed=1",
        "max_steps=3",
    ]
    assert load(*given).max_steps == 3 and load(*given[::-1]).max_steps == 1


def test_tables_of_names_take_new_ones():
    given = ["task=classify", "data=reviews", "data.label_map={0: negative, 6: null}"]
    data = load(*given, "data.more_validation={other: b.csv}").data
    assert (
        data.label_map["0"] == "negative"
        and data.label_map["6"] is None
        and data.label_map["5"] == "positive"
    )
    assert data.more_validation == {"other": "b.csv"}
    given = ["task=classify", "data=reviews", "data.label_map={0: nowhere}"]
    rejects("label_map maps to nowhere", load, *given)


NAMES = [
    ("data.label_map={-1: neg}", {"-1": "neg"}),
    ('data.label_map={a: "it\'s", c d: null}', {"a": "it's", "c d": None}),
    ('data.label_map={\'a. b\': yes, 1.5: "say \\"hi\\""}', {"a. b": "yes", "1.5": 'say "hi"'}),
    ("data.labels=[don't, -1, yes, null, 1e3, 'a b']", "don't|-1|yes|null|1e3|a b".split("|")),
    ("data.more_validation={dev: dev's.csv}", {"dev": "dev's.csv"}),
    ("data.path='~/x'", "~/x"),
]


@pytest.mark.parametrize(("override", "expected"), NAMES)
def test_names_of_the_users_own_may_hold_any_character(override, expected):
    data = load("micro_batch_size=null", "task=classify", "data=csv", override).data
    assert getattr(data, override.partition("=")[0].removeprefix("data.")) == expected


def test_every_experiment_composes():
    for name in options("experiment"):
        cfg = cli.load_config(TrainConfig, [f"experiment={name}", "data.path=d"])
        assert make_plan(cfg, world_size=8, rows=10**6, seq_len=cfg.seq_len).total_steps > 0


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            "experiment=demo_tweets model.pretrained=a",
            {"model.pretrained": "a"},
        ),
        (
            "experiment=demo_tweets model=albert_base",
            {"model.pretrained": None, "model.hidden_size": 768},
        ),
        (
            "experiment=squad_albert model.pretrained=a",
            {"model.pretrained": "a"},
        ),
        ("experiment=squad_albert model.architecture=bert", {"model.pretrained": None}),
        (
            "experiment=demo model.pretrained=a",
            {"model.hidden_size": None, "model.initializer_range": None},
        ),
        (
            "model=albert_base model.pretrained=a",
            {"model.hidden_size": 768},
        ),  # checked against the weights
        ("experiment=demo_tweets max_steps=9", {"max_steps": 9, "max_epochs": None}),
        ("experiment=albert_pretrain optim.warmup_fraction=0.2", {"optim.warmup_steps": None}),
        ("experiment=squad_albert data.validation_fraction=0.2", {"data.validation": None}),
        ("experiment=demo optim=albert_v1 optim.lr=0.5", {"optim.lr": 0.5, "optim.eps": 1e-6}),
        (
            "experiment=demo_tweets model.pretrained=null model.tokenizer=a",
            {"model.pretrained": None},
        ),
    ],
)
def test_what_the_user_types_wins_over_a_recipe_that_chooses_the_same_thing_by_another_key(
    overrides, expected
):
    words = re.findall(r"\w\S*=(?:{.*}|\S+)", overrides)
    composed = cli.compose_config(TrainConfig, ["run_dir=r", *words])
    assert {key: OmegaConf.select(composed, key) for key in expected} == expected


@pytest.mark.parametrize(
    ("schema", "pair"),
    [
        (TrainConfig, ["model.architecture=bert", "model.pretrained=b"]),
        (TrainConfig, ["optim.warmup_fraction=0.1", "optim.warmup_steps=5"]),
        (
            TrainConfig,
            [
                "task=classify",
                "data=csv",
                "data.validation_fraction=0.1",
                "data.validation=dev.csv",
            ],
        ),
        (PrepareConfig, ["corpus=pydocs", "tokenizer.vocab_size=100", "tokenizer.pretrained=a"]),
    ],
)
def test_two_keys_that_choose_the_same_thing_are_not_both_typed(schema, pair):
    first, second = (each.partition("=")[0] for each in pair[-2:])
    rejects(
        f"^{first} and {second} choose the same thing; leave one of them out$",
        cli.compose_config,
        schema,
        pair,
    )


def test_every_corpus_composes():
    for name in options("corpus"):
        extra = {"hf": ["corpus.datasets=[{path: a/b}]"], "pydocs": [], "wiki_books": []}
        overrides = extra.get(name, ["corpus.path=x"])
        assert (
            cli.load_config(PrepareConfig, ["output=o", f"corpus={name}", *overrides]).corpus.name
            == name
        )


# ---- what follows --------------------------------------------------------------------------------------------------


def plan(*overrides, world_size=1, rows=1000):
    return make_plan(load(*overrides), world_size=world_size, rows=rows, seq_len=512)


@pytest.mark.parametrize(
    ("tokens", "micro_batch", "expected"),
    [(2048, 32, 4), (2048, 6, 4), (2048, 5, 2), (100, 8, 1), ("null", 32, 32), (10**6, 32, 32)],
)
def test_a_batch_is_divided_into_equal_parts_that_the_instance_takes(
    tokens, micro_batch: int, expected: int
):
    batch = [f"global_batch_size={4 * micro_batch}", f"micro_batch_size={micro_batch}"]
    sizes = plan(
        *batch, f"instance.micro_batch_tokens={tokens}", "eval_batch_size=40", world_size=2
    )
    assert (sizes.micro_batch_size, sizes.accumulation) == (expected, 2 * micro_batch // expected)
    assert sizes.global_batch_size == 4 * micro_batch
    assert sizes.eval_batch_size == {2048: 4, 100: 1}.get(tokens, 40)
    assert plan("global_batch_size=96", world_size=8).micro_batch_size == 12


def test_a_task_cuts_a_batch_that_no_setting_has_cut_and_evaluations_stay_whole():
    rest = {"world_size": 8, "rows": 10**6, "seq_len": 512, "cut": lambda share, _: share // 4}
    sizes = make_plan(load("global_batch_size=96"), **rest)
    assert (sizes.micro_batch_size, sizes.accumulation, sizes.eval_batch_size) == (4, 3, 12)
    sizes = make_plan(load("global_batch_size=96", "micro_batch_size=6"), **rest)
    assert (sizes.micro_batch_size, sizes.accumulation) == (6, 2)


@pytest.mark.parametrize("machines", [1, 16])
# None: precompiling, which does not open the data
@pytest.mark.parametrize("seq_len", [512, None])
def test_the_published_recipe_fits_any_number_of_trn1_machines(machines: int, seq_len: int | None):
    cfg = cli.load_config(
        TrainConfig, ["experiment=albert_pretrain", "backend=xla", "instance=trn1.32xlarge"]
    )
    sizes = make_plan(cfg, world_size=32 * machines, rows=10**6, seq_len=seq_len)
    assert sizes.micro_batch_size * sizes.accumulation * 32 * machines == 4096
    assert sizes.micro_batch_size == 4 or seq_len is None


def test_the_shortest_length_counts():
    assert plan("max_steps=50", "max_epochs=1").total_steps == 1000 // 32
    assert plan("max_steps=5", "max_epochs=1").total_steps == 5
    assert plan("max_steps=null", "max_epochs=2.5", rows=320).total_steps == 25
    assert plan("max_steps=null", "max_epochs=1.15", rows=3200).total_steps == 115
    assert plan("max_steps=null", "max_epochs=1.999", rows=3200).total_steps == 199
    # The ALBERT scaling recipe: twice the nodes, half the steps.
    fixed = (
        "global_batch_size=null",
        "micro_batch_size=16",
        "max_steps=null",
        "max_examples=640000",
    )
    assert [plan(*fixed, world_size=ranks).total_steps for ranks in (16, 32)] == [2500, 1250]


@pytest.mark.parametrize(
    ("overrides", "world_size", "says"),
    [
        (["global_batch_size=30"], 4, "cannot be split evenly over 4 ranks"),
        (
            ["global_batch_size=32", "micro_batch_size=3"],
            2,
            "not a multiple of micro_batch_size=3 x 2 ranks",
        ),
        (
            ["global_batch_size=2048"],
            2,
            "the data has 1000 training sequences, fewer than one batch of 2048",
        ),
        (["max_steps=null", "max_examples=31"], 1, "shorter than one step"),
        (["global_batch_size=null", "micro_batch_size=1"], 1001, "over 1001 ranks"),
        (["optim=albert_v1"], 1, "optim.warmup_steps=3125 is longer than the run of 10 steps"),
    ],
)
def test_an_impossible_size_is_rejected(overrides, world_size, says):
    rejects(re.escape(says), plan, *overrides, world_size=world_size)
