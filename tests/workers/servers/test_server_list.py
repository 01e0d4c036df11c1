"""The addresses of running servers. What a bad list does to a run is tested with the plugins that have such an option."""

import pytest

from miles_core.plugin import ConfigError
from miles_workers.servers import ServerList


def test_a_list_and_a_file_give_addresses(tmp_path):
    assert ServerList("--vllm-url", ["http://a:1/", "https://b"]).read() == ("http://a:1", "https://b")
    file = tmp_path / "servers.txt"
    file.write_text("http://a:1  # the first\n\n# none\nhttp://b:2/\n")
    for value in (f"@{file}", str(file)):
        servers = ServerList("--vllm-url", [value])
        assert servers.read() == ("http://a:1", "http://b:2") and not servers.has_changed()
    file.write_text("http://c:3\n")
    assert servers.has_changed() and servers.read() == ("http://c:3",)


@pytest.mark.parametrize(
    ("items", "said"),
    [
        (
            ["http://a:1", "a:2"],
            "--vllm-url http://a:1,a:2: 'a:2' is not the address of a server; write http:// or https://",
        ),
        (["http://a:1", "http://a:1/"], "http://a:1 is listed twice"),
        (["http://a:x"], "'http://a:x' is not the address of a server"),
        (["@nowhere.txt"], "--vllm-url nowhere.txt: the file with the servers' addresses cannot be read"),
    ],
)
def test_a_bad_list_is_refused_with_its_option(items, said):
    with pytest.raises(ConfigError, match=said):
        ServerList("--vllm-url", items).read()
