# Checks the environment in envs/greetings; the full `agentrl env check greetings` takes a minute.
set -e
agentrl env check greetings --tasks 1 --only task_contract --only oracle_max --only floor_gap --only seed_control
printf '/run echo hello train-0 > out.txt\ndone\n' | agentrl env play greetings
