"""Backward as a program: captured as a torch.fx graph, cached, run directly or compiled."""
