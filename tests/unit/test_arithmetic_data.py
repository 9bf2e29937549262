"""The arithmetic environment's solutions are right. tests/contract has what every environment must do."""

import re

from nightshift_arithmetic import data


def test_solutions_are_right_by_an_independent_reading() -> None:
    for example in data.load("validation", 1000):
        start, *rest = re.findall(r"(\w+) (?:(\d+)|a (\w+) of) \w+\.", example.question)
        assert start[0] == "has"
        total, lines = int(start[1]), []
        for verb, number, container in rest:
            amount = int(number) if number else data.CONTAINERS[container]
            sign = "+" if verb in data._VERBS[+1] else "-"
            result = total + amount if sign == "+" else total - amount
            assert 0 <= result < 100
            lines.append(f"<<{total}{sign}{amount}={result}>>")
            total = result
        assert 1 <= len(lines) <= 3
        assert example.solution == "\n".join([*lines, f"#### {total}"])
        assert example.answer == str(total)
