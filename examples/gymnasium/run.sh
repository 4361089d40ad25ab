set -e
python play.py
