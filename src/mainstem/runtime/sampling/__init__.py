"""From logits to tokens: penalties, grammars, scores and vectors of prompts."""
