# The strict reward must hold, and the loose one must be found out.
set -e
agentrl redteam --scorer rewards:strict --honest '\boxed{7}' --wrong '\boxed{8}' --family I
if agentrl redteam --scorer rewards:loose --honest '\boxed{7}' --wrong '\boxed{8}' --family I; then
  echo "the loose reward was not found out"; exit 1
fi
echo "as expected: the loose reward can be cheated, the strict one cannot"
