"""Which description of the MTP layer a trainer receives."""

import sys
from types import SimpleNamespace

import pytest

from miles_core.contracts.hooks import load_hooks
from miles_core.plugin import ConfigError, Plugin, hookimpl
from miles_core.plugin.facts import Facts
from miles_core.plugin.resolve import resolve
from miles_core.trainer import MtpRequest, collect_mtp_request

REQUEST = MtpRequest("mtp", "draft", 0.3, lr=1e-4)


class Drafting:
    @hookimpl
    def on_mtp_layers(self, requests):
        requests.append(REQUEST)


@pytest.fixture
def asked(monkeypatch):
    """Return the layers that a trainer receives in a run with these plugins, each of which requests training."""
    monkeypatch.setitem(sys.modules, "miles_further", SimpleNamespace(Drafting=Drafting))

    def ask(*names):
        catalogue = {n: Plugin(n, "test", "1.0", "~=0.1", hooks={"": "miles_further:Drafting"}) for n in names}
        hooks = load_hooks(resolve(list(names), catalogue, Facts()), catalogue)
        return collect_mtp_request(SimpleNamespace(hooks=hooks), SimpleNamespace(name="actor"))

    return ask


def test_a_plugin_says_how_the_layer_is_trained(asked):
    assert asked() is None
    assert asked("one") == REQUEST


def test_two_plugins_cannot_train_one_layer(asked):
    with pytest.raises(ConfigError, match="of actor: leave one of one, two out"):
        asked("one", "two")
