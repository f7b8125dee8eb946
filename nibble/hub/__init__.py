"""Is the model here?"""
