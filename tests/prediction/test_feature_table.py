"""What a row of ``analysis.features`` says of an option is what the drivers and the sums do."""

from __future__ import annotations

from random import Random

import pytest

from analysis.algorithms import ALGORITHMS, Family, find
from analysis.features import FEATURES, PASSES, draw, features_of, with_option
from analysis.hardware import A100_80GB
from analysis.problem import Problem
from analysis.shapes import AttentionShape
from kernels.launches import AUTO, Device, launches_of
from repro.prediction import predict

PLAIN = Problem(AttentionShape(2, 4, 256, 256, 64, dtype="bf16"))
#: What an option needs beside itself.
BESIDE = {"bias_gradient": ("bias",), "sink_gradient": ("sink_logits",)}


def having(name: str, problem: Problem = PLAIN) -> Problem:
    """The problem with the option, which hides something where it is a window."""
    for each in (*BESIDE.get(name, ()), name):
        for seed in range(50):
            found = with_option(each, Random(seed), problem)
            assert found is not None
            if each in features_of(found):
                problem = found
                break
    assert name in features_of(problem)
    return problem


def refused(algorithm: str, problem: Problem, pass_: str) -> bool:
    try:
        launches_of(algorithm, problem, pass_, Device("90"))
    except ValueError:
        return True
    return False


@pytest.mark.parametrize("name", FEATURES)
def test_who_takes_an_option_alone(name: str) -> None:
    feature, problem = FEATURES[name], having(name)
    for algorithm in ALGORITHMS:
        for pass_ in feature.passes:
            taken = not refused(algorithm, problem, pass_)
            others = set(BESIDE.get(name, ()))
            wanted = all(FEATURES[x].taken(algorithm, pass_) for x in {name} | others)
            if name == "deterministic" and find(algorithm).family not in feature.families:
                continue  # asked of dispatch: of a name it says nothing
            if name == "packed" and algorithm == "flash-deterministic" and pass_ == "backward":
                wanted = False  # its workspace has no place for them
            if name == "sawtooth" and "sm90-deterministic" in algorithm and pass_ == "backward":
                wanted = False  # a wave would wait for the one before
            assert taken == wanted, (algorithm, pass_)


@pytest.mark.parametrize("name", FEATURES)
def test_an_option_has_its_macro_and_its_tensors(name: str) -> None:
    feature, problem = FEATURES[name], having(name)
    for pass_ in feature.passes:
        main = launches_of("flash", problem, pass_, Device("80")).main
        plain = launches_of("flash", PLAIN, pass_, Device("80")).main
        if feature.macro and pass_ in feature.kernels:
            assert dict(main.kernel.macros)[feature.macro] == 1
            assert not dict(plain.kernel.macros).get(feature.macro)
        moved = predict("flash", problem, pass_, A100_80GB, once=True).traffic.by_tensor()
        usual = predict("flash", PLAIN, pass_, A100_80GB, once=True).traffic.by_tensor()
        added = {tensor for tensor, _ in moved} - {tensor for tensor, _ in usual}
        made = [FEATURES[x] for x in (name, *BESIDE.get(name, ())) if pass_ in FEATURES[x].kernels]
        wanted = {tensor for each in made for tensor in each.arrays(problem)}
        assert added - {"dbias_accum"} == wanted - {"k", "v"}


@pytest.mark.parametrize("seed", range(40))
def test_options_drawn_together_run(seed: int) -> None:
    """On whatever dispatch picks; each says that it is there."""
    random = Random(seed)
    shape = AttentionShape(
        random.choice((1, 2)),
        4,
        random.randrange(1, 300),
        random.randrange(1, 300),
        random.choice((40, 64, 128)),
        random.choice((2, 4)),
        random.choice(("fp16", "bf16")),
    )
    problem = draw(random, Problem(shape))
    for pass_ in PASSES[:1] if problem.shape.fp8 else PASSES:
        for capability in ("80", "90"):
            found = launches_of(AUTO, problem, pass_, Device(capability))
            named = {x for x in features_of(problem) if FEATURES[x].macro and pass_ in FEATURES[x].kernels}
            if find(found.algorithm).family is Family.FLASH:
                assert found.main.kernel.config.features | {"block_mask"} == named | {"block_mask"}
        moved = predict(AUTO, problem, pass_, A100_80GB, once=True).traffic.by_tensor()
        used = (FEATURES[name] for name in features_of(problem))
        wanted = {
            tensor for each in used if pass_ in each.passes and pass_ in each.kernels for tensor in each.arrays(problem)
        }
        assert wanted <= {tensor for tensor, _ in moved}
