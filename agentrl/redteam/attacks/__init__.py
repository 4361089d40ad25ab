"""The corpus: one module per family, one function per attack; your own modules go into AGENTRL_PATH/attacks/."""

from agentrl.catalogue import roots

__path__ += [str(root / "attacks") for root in roots() if (root / "attacks").is_dir()]
