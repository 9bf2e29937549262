"""The tests that every environment must pass: `uv run --group dev pytest environments/NAME`.

Override `problem` if two texts can ask the same, `right_answer` if `answer` is not a right text, and `wrong_answers` if
more texts must score 0.
"""

from tests.contract.environments import PackageContract


class TestEnvironment(PackageContract):
    name = "NAME"
