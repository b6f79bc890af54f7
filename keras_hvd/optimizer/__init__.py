"""The distributed optimizer, and checks of models that train with it: Keras alone."""
