"""Where compute is spent: difficulty profiles, curricula, selection of prompts."""
