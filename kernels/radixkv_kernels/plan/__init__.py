"""Plans of tree attention: which rows read which cells of KV together."""
