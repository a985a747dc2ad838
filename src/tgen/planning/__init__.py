"""From a corpus, the minutes and this machine to a plan, as pure functions without torch."""
