"""examples/compiled_decode.py produces the tokens of a run without offloading."""

import importlib.util
from pathlib import Path
from types import ModuleType

import compiling  # noqa: F401  its own inductor cache
import pytest
import torch


@pytest.fixture
def example() -> ModuleType:
    path = Path(__file__).parents[1] / "examples" / "compiled_decode.py"
    spec = importlib.util.spec_from_file_location("compiled_decode", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tokens_are_the_same(
    device: str, example: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    torch._dynamo.reset()
    sizes = ["--groups", "2", "--batch", "2", "--turns", "3", "--tokens", "4"]
    assert example.main(["--device", device, *sizes]) == 0
    printed = capsys.readouterr().out
    assert printed.count("the same, 48") == (3 if device == "cuda" else 2)


def test_a_missing_device_is_one_line_and_exit_code_2(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert example.main(["--device", "cuda"]) == 2
    assert capsys.readouterr().err == (
        "[compiled_decode] --device cuda: torch.cuda.is_available() is False (see hicache info).\n"
    )


def test_nothing_to_decode_is_refused(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        example.main(["--groups", "0"])
    assert "argument --groups: must be an integer of 1 or more, got '0'" in capsys.readouterr().err
