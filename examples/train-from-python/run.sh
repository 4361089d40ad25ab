set -e
python train.py
agentrl runs
