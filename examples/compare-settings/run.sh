set -e
STEPS=${STEPS:-40}
for curriculum in learnability uniform; do
  agentrl train quickstart --quiet --set run.name=$curriculum --set curriculum.type=$curriculum --set run.steps=$STEPS \
    --set eval.tasks=${TASKS:-100} ${EPOCHS:+--set warm_start.epochs=$EPOCHS}
done
agentrl eval runs/learnability --compare runs/uniform --k 1 --tasks ${TASKS:-100}
agentrl runs
