"""Any Python package with tests becomes an environment: `agentrl env from-repo PACKAGE==VERSION --out envs/mypkg`."""
