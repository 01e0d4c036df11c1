"""Speculative decoding with drafts that learn while the policy moves, for miles-core."""

from miles_core import Hint, Plugin, Rule, below
from miles_speculative.config import SpeculativeConfig

__version__ = "0.1.0"

plugin = Plugin(
    name="speculative",
    summary="drafts several tokens a step with an MTP layer and verifies them without changing the distribution",
    version=__version__,
    core="~=0.1",
    config=SpeculativeConfig,
    hooks={
        "": "miles_speculative.hooks:Speculative",
        "trainer == embedded or engine == embedded": "miles_speculative.embedded:EmbeddedSpeculative",
    },
    provides={"decoder": {"speculative": "miles_speculative.build:make_decoder"}},
    uses={"engine.draft": "the engine verifies the drafted tokens"},
    converts={"--mtp-num-layers": "miles_speculative.checkpoint:convert"},
    requires=(
        Rule(
            needs="speculative.mtp_num_layers == 1",
            when="engine == embedded",
            because="the embedded engine drafts every token with the same MTP layer, the checkpoint's first",
        ),
        Rule(
            needs="model.mtp_layers >= 1",
            because="drafts come from the checkpoint's MTP layer; miles convert --mtp-num-layers 1 --model-dir DIR --save-dir DIR "
            "creates one",
        ),
        Rule(
            needs="trainer == embedded",
            when="engine == embedded",
            because="the embedded engine takes the draft's weights with the policy's, and only the embedded trainer holds both",
        ),
    ),
    hints=(
        Hint(
            "low-acceptance",
            "*speculative/accept_rate",
            below(0.3),
            "{metric}: only {value} of the drafted tokens are kept",
            "draft fewer tokens (--spec-lookahead 1), train the draft (--enable-mtp-training), and with a higher --draft-lr",
            when="plugin.speculative",
        ),
    ),
)
