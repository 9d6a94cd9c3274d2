"""Tables and claims are written from the results alone."""

import dataclasses

import pytest

from benchmarks import report
from benchmarks.plots import digest, drawn, heading
from benchmarks.report import claims, sentence
from benchmarks.tables import number, performance, with_range
from tests.unit.benchmarks.doubles import MACHINE, part, sample

W1 = part("w1", [sample(0, "service", 850), sample(0, "bound", 1000), sample(0, "mosec", 500)])


@pytest.mark.parametrize(("value", "text"), [(1234.5, "1,234"), (34.56, "34.6"), (0.8976, "0.898"), (0, "0.00")])
def test_numbers_have_three_digits(value, text):
    assert number(value) == text


def test_a_range_is_printed_if_there_is_one():
    assert with_range([2, 1, 3]) == "2.00 (1.00–3.00)"
    assert with_range([2, 2, 2]) == "2.00"
    assert with_range(None) == ""


def test_the_page_names_machine_date_commit_and_every_subject():
    text = performance({"w1": W1})
    for expected in (
        "Abacus 9, 2 cores",
        "2026-11-21 10:00 UTC",
        "`abc1234`",
        "| mosec (0.9.8, WORKERS=2) | 50.0 | 0.588 |",
    ):
        assert expected in text
    assert "| service | 85.0 |  | 850 | 0.850 |" in text
    assert "### W1, 32 callers\n\nAbacus 9, 2 cores, code abc1234, 2026-11-21.\n\n| subject |" in text


def test_missed_targets_are_on_both_pages():
    assert "| W1, mixed lengths | ≥ 0.9 × bound | 0.850 | **no** |" in performance({"w1": W1})
    text = claims({"w1": dataclasses.replace(W1, machine=MACHINE | {"cpu": "AMD EPYC"})})
    assert "Missed: W1, mixed lengths ≥ 0.9 × bound: 0.850." in text
    assert "1 are met, 16 not measured" in text


def test_the_claims_name_machine_date_and_the_other_subjects():
    text = claims({"w1": W1})
    assert text.startswith("Measured 2026-11-21 on Abacus 9, 2 cores")
    assert "| lengths 8 to 256, safetensors | 85.0 | 5.00, 9.00 | 0.85 | mosec 1.70 | not measured |" in text


def test_both_pages_show_how_far_the_service_differs_from_itself():
    rounds = [sample(n, name, tok_s) for n in range(2) for name, tok_s in [("service", 100), ("service again", 98 + n)]]
    assert "| service again | 9.85 (9.82–9.88) | 0.985 (0.983–0.988) |" in performance({"w1": part("w1", rounds)})
    assert "|  |  | 0.985 (0.983–0.988) |" in claims({"w1": part("w1", rounds)})


def test_pages_and_pictures_name_the_processor_and_mark_older_code_and_another_processor():
    other = {**MACHINE, "cpu": "Slide rule", "isa": "avx2 amx_bf16"}
    old = part("concurrency", [sample(0, "service", 850, point=32)], commit="0123456", machine=other)
    parts = {"w1": dataclasses.replace(W1, measured_at="2026-11-22 10:00 UTC"), "concurrency": old}
    origin = "Slide rule (avx2 amx_bf16), 2 cores, code 0123456, 2026-11-21"
    assert f"### Callers\n\n**Older code, another processor: {origin}.**\n\n![Callers]" in performance(parts)
    assert heading(parts, "concurrency") == f"OLDER CODE, ANOTHER PROCESSOR · {origin}"
    assert heading({"concurrency": old}, "concurrency") == origin
    assert f"16 tokens, one caller (**older code, another processor**: {origin})" in claims(
        parts | {"w2c1": dataclasses.replace(old, name="w2c1")}
    )


def test_the_sentence_of_the_readme_names_processor_date_and_how_many_targets_are_missed():
    machine = MACHINE | {"cpu": "AMD EPYC"}
    short = part("w2", [sample(0, "service", 900), sample(0, "bound", 1000), sample(0, "mosec", 300)], machine=machine)
    text = sentence({"w1": dataclasses.replace(W1, machine=machine), "w2": short})
    assert text.startswith("On AMD EPYC, 2 cores (2026-11-21), the service has ")
    assert "1.70 to 3.00 times the requests/s of Mosec with tensors as bytes" in text
    assert "0.850 to 0.900 times the speed of plain torch" in text
    assert "lists" not in text, "that was not measured"
    assert "; of 18 targets 3 are met, 1 missed, 14 not measured ([" in text


def test_the_sentence_of_the_readme_marks_older_code():
    later = dataclasses.replace(W1, measured_at="2026-11-22 10:00 UTC", commit="9999999")
    old = part("w2json", [sample(0, "service", 850), sample(0, "mosec", 500)])
    assert "1.70 times with lists (**older code**: " in sentence({"w1": later, "w2json": old})


def test_claims_of_several_days_name_the_first_and_the_last():
    later = part("w2", [sample(0, "service", 1)], measured_at="2026-11-23 10:00 UTC")
    assert "Measured 2026-11-21 to 2026-11-23" in claims({"w1": W1, "w2": later})


def test_a_claim_measured_differently_states_it():
    short = part("w2c1", [sample(0, "service", 1, workload="w2")], settings={"seconds": 2.0, "warm_s": 1})
    assert "medians over rounds (1 of 8 s; 16 tokens, one caller: 1 of 2 s)" in claims({"w1": W1, "w2c1": short})


def test_a_failed_subject_is_reported_as_failed():
    failed = {"round": 0, "subject": "mosec", "workload": "w1", "failed": "no answer"}
    text = performance({"w1": part("w1", [sample(0, "service", 850), failed])})
    assert "mosec (0.9.8, WORKERS=2), 1 of 1 failed" in text


def test_a_failed_sweep_is_reported_as_failed():
    failed = {"round": 1, "subject": "service", "workload": "", "failed": "no answer"}
    text = performance({"concurrency": part("concurrency", [sample(0, "service", 850, point=32), failed])})
    assert "|  | failed |" in text
    assert "| W1 | 32 | 85.0 |" in text


def test_cost_is_printed_beside_that_of_half_the_length():
    samples = [
        sample(0, "service", 800, workload="length", point=8),
        sample(0, "bound", 1000, workload="length", point=8),
    ]
    samples += [sample(0, "service", 400, workload="length", point=16)]
    text = performance({"length": part("length", samples)})
    assert "| one length | 8 |  | 80.0 | 800 | 9.00 | 0.80 |  |" in text
    assert "| one length | 16 |  | 40.0 | 400 | 9.00 |  | 2.00 |" in text


def test_only_the_text_between_the_markers_changes():
    page = "above\n<!-- bench -->\nold\n<!-- /bench -->\nbelow\n"
    assert report.with_section(page, "bench", r"new \1") == "above\n<!-- bench -->\nnew \\1\n<!-- /bench -->\nbelow\n"
    with pytest.raises(ValueError, match="no markers"):
        report.with_section(page, "claims", "new")


def test_the_digest_of_a_picture_changes_with_what_it_shows():
    one, other = (
        drawn({"batch": part("batch", [sample(0, "service", tok_s, point=1), sample(0, "bound", 1, point=1)])}, "batch")
        for tok_s in (10, 11)
    )
    assert one == [{"workload": "w1", "point": 1, "tok_s": [10, 10, 10]}]
    assert len({digest(one, "AMD"), digest(other, "AMD"), digest(one, "Intel")}) == 3
    assert drawn({}, "batch") == []
