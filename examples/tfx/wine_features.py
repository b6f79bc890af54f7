"""The columns of the wine data, for the pipeline and for its Trainer."""

from sklearn import datasets

LABEL = "cultivar"


def load():
    """The measurements by name, of 178 wines, with the cultivar of each."""
    data = datasets.load_wine()
    names = [name.replace("/", "_") for name in data.feature_names]
    return {**dict(zip(names, data.data.T)), LABEL: data.target}


FEATURES = sorted(set(load()) - {LABEL})
