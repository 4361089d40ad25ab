"""The corpus: one module a family, one function an attack, found by name; yours go into AGENTRL_PATH/attacks/."""

from agentrl.catalogue import roots

__path__ += [str(root / "attacks") for root in roots() if (root / "attacks").is_dir()]
