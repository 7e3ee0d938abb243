"""examples/compiled_decode.py produces the tokens of a run without offloading."""

import importlib.util
from pathlib import Path

import compiling  # noqa: F401  its own inductor cache
import pytest
import torch


def test_tokens_are_the_same(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(__file__).parents[1] / "examples" / "compiled_decode.py"
    spec = importlib.util.spec_from_file_location("compiled_decode", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)

    torch._dynamo.reset()
    sizes = ["--groups", "2", "--batch", "2", "--turns", "3", "--tokens", "4"]
    assert example.main(["--device", device, *sizes]) == 0
    printed = capsys.readouterr().out
    assert printed.count("the same, 48") == (3 if device == "cuda" else 2)
