import os

import pytest

from miles_core.errors import ConfigError
from miles_core.reward.custom import load_function


def load(spec, default="reward", parameters=("args", "sample")):
    return load_function(str(spec), flag="--custom-rm-path", default=default, parameters=parameters)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "def reward(args, sample):\n    return 1.0\n"
        "async def other(args, sample):\n    return 2.0\n"
        "def short(args):\n    return 0\n"
        "class Judge:\n    async def __call__(self, args, sample):\n        return 3.0\n"
        "judge = Judge()\nnumber = 3\n"
    )
    return path


def test_default_and_named_functions(file):
    function = load(file)
    assert (function.name, function.origin, function.is_async) == ("reward", str(file), False)
    assert function(None, None) == 1.0
    assert load(f"{file}:other").is_async
    assert load(f"{file}:judge").is_async


def test_one_file_is_one_module(file):
    assert load(file).function.__globals__ is load(f"{file}:other").function.__globals__


def test_a_module_path():
    for spec in ("miles_core.rollout.filter:nonzero_std", "miles_core.rollout.filter.nonzero_std"):
        assert load(spec, parameters=("args", "samples")).name == "nonzero_std"


def test_a_file_may_import_its_neighbour(tmp_path):
    (tmp_path / "neighbour_of_reward.py").write_text("VALUE = 5.0\n")
    (tmp_path / "f.py").write_text(
        "def reward(args, sample):\n    import neighbour_of_reward as n\n    return n.VALUE\n"
    )
    assert load(tmp_path / "f.py")(None, None) == 5.0


@pytest.mark.parametrize(
    ("suffix", "message"),
    [
        (":nothing", r"has no function 'nothing' \(it has other, reward, short\)"),
        (":number", "number in .* is a int, not a function"),
        (":short", r"short\(args\) in .*mine.py cannot be called as short\(args, sample\)"),
    ],
)
def test_wrong_names_and_signatures(file, suffix, message):
    with pytest.raises(ConfigError, match=message) as error:
        load(f"{file}{suffix}")
    assert "--custom-rm-path" in str(error.value)


def test_a_missing_file(tmp_path):
    with pytest.raises(ConfigError, match=r"there is no file .*gone.py"):
        load(tmp_path / "gone.py")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def reward(:\n", r"failed \(line 1\): SyntaxError"),
        ("import no_such_module_here\n", "ModuleNotFoundError.*no_such"),
    ],
)
def test_a_file_that_does_not_load_is_loaded_again_when_repaired(tmp_path, text, message):
    path = tmp_path / "f.py"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load(path)
    path.write_text("def reward(args, sample):\n    return 4.0  # repaired\n")
    assert load(path)(None, None) == 4.0


@pytest.mark.parametrize("spec", ["reward", "no.such.package:reward"])
def test_neither_file_nor_module(spec):
    with pytest.raises(ConfigError, match=r"path/to/file.py|importing no.such.package failed: ModuleNotFoundError"):
        load(spec)


def test_a_file_that_leaves_the_program_or_its_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit(3)\n")
    with pytest.raises(ConfigError, match=r"loading .*leaves.py failed: SystemExit: 3"):
        load("leaves.py")
    (tmp_path / "moves.py").write_text(
        "import os\nos.chdir('/')\ndef reward(args, sample):\n    os.chdir('/')\n    return 1\n"
    )
    function = load("moves.py")
    assert os.getcwd() == str(tmp_path) and function(None, None) == 1 and os.getcwd() == str(tmp_path)


def test_a_module_path_of_a_file_that_is_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "only_here.py").write_text("def reward(args, sample): return 1\n")
    with pytest.raises(ConfigError, match=r"there is a file only_here.py: write only_here.py:reward$"):
        load("only_here.reward")


def test_an_error_in_a_users_function_names_the_last_line_in_its_file(tmp_path):
    (tmp_path / "judge.py").write_text("import json\n\ndef reward(args, sample):\n    return json.loads('{')\n")
    function = load_function(
        f"{tmp_path}/judge.py", flag="--custom-rm-path", default="reward", parameters=("args", "sample")
    )
    with pytest.raises(ValueError) as caught:
        function(None, None)
    assert caught.value.__notes__ == ["judge.py:4"]
