"""Models: encoders of the BERT family, whose attention layers are stored layers, from token ids to hidden states."""
