"""What every environment must do: run this test with `uv run --group dev pytest environments/NAME`.

If two texts can ask the same, if another text than `answer` is the right one, or if more texts must score 0, override
`problem`, `right_answer` or `wrong_answers`.
"""

from tests.contract.environments import PackageContract


class TestEnvironment(PackageContract):
    name = "NAME"
