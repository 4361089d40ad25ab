set -e
agentrl eval recipe.yaml --endpoint "${ENDPOINT:?set it to the URL that ends in /v1}" --model "${MODEL:?}" \
  ${KEY_ENV:+--key-env "$KEY_ENV"} --k 1,4 --tasks "${TASKS:-20}" --max-tokens-total 500000
