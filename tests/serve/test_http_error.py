"""Names of fields in errors, as the client sent them."""

from collections.abc import Iterator

from tgen.serve.http_error import name_as_sent


class CountedNames(dict[str, str]):
    """Names that count how often they are looked at."""

    n = 0

    def __contains__(self, name: object) -> bool:
        self.n += 1
        return super().__contains__(name)

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("all names are read")


def test_the_longest_parent_of_a_field_has_the_clients_name() -> None:
    names = {"messages": "input", "messages[1]": "input[3]", "a.b": "c", "a": "d"}
    assert name_as_sent("messages", names) == "input"
    assert name_as_sent("messages[1].content[0]", names) == "input[3].content[0]"
    assert name_as_sent("messages[12].content", names) == "input[12].content"
    assert name_as_sent("a.b[2]", names) == "c[2]"
    assert name_as_sent("a.bc", names) == "d.bc"
    assert name_as_sent("other", names) == "other"


def test_a_field_is_not_compared_with_every_name() -> None:
    names = CountedNames((f"messages[{i}]", f"input[{i}]") for i in range(1000))
    assert name_as_sent("messages[700].content[0].text", names) == "input[700].content[0].text"
    assert names.n < 10
