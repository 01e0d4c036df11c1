import subprocess
import sys

from miles_core.data.transformers_import import Distributions

PROGRAM = """
from miles_core.data.transformers_import import import_transformers
import_transformers()
import sys
from transformers import Qwen3MoeForCausalLM
import transformers.loss.loss_for_object_detection as losses
from transformers.utils import is_scipy_available
assert not {"scipy", "sklearn"} & set(sys.modules), sys.modules.keys()
assert is_scipy_available() and losses.is_scipy_available is is_scipy_available
assert losses.linear_sum_assignment("cost") == "solved cost"
"""

READS = """
import os, pathlib, sys
scan, scanned = os.scandir, []
os.scandir = lambda path: scanned.append(os.fspath(path)) or scan(path)
if sys.argv[1] == "once":
    from miles_core.data.transformers_import import import_transformers
    import_transformers()
import transformers, transformers.models, transformers.models.qwen3
print(sum(path.endswith("models") for path in scanned), sum(path.endswith("albert") for path in scanned))
print(sorted(dir(transformers)), sorted(dir(transformers.models)), sorted(dir(transformers.models.qwen3)))
"""


def test_the_files_of_all_models_are_read_once_with_the_same_result():
    def run(how):
        done = subprocess.run([sys.executable, "-c", READS, how], capture_output=True, text=True, check=True)
        return done.stdout.splitlines()[-2:]

    (usual, names), (once, found) = run("as Transformers does"), run("once")
    assert [int(a) - int(b) for a, b in zip(usual.split(), once.split(), strict=True)] == [1, 1]
    assert found == names


def test_model_classes_import_without_scipy_and_scikit_learn_and_a_function_imports_it_when_called(tmp_path):
    for name in ("scipy", "sklearn"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
    (tmp_path / "scipy/optimize.py").write_text("def linear_sum_assignment(cost): return f'solved {cost}'\n")
    (tmp_path / "sklearn/metrics.py").write_text("def roc_curve(*arguments): return arguments\n")
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{PROGRAM}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_distributions_are_listed_when_a_package_is_not_named_like_one():
    listed = []

    def find():
        listed.append(True)
        return {"torch": ["torch"], "PIL": ["pillow"]}

    found = Distributions(find)
    assert found.get("torch") == ["torch"]
    assert not listed
    assert found.get("PIL") == ["pillow"]
    assert found.get("flash_attn", []) == []
    assert sorted(found) == ["PIL", "torch"]
    assert len(found) == 2
    assert len(listed) == 1
