"""What shells complete: names of presets and clusters, read without torch. Files they know themselves."""


def presets(incomplete: str) -> list[str]:
    from tapas.models.catalog import PRESETS

    return [name for name in PRESETS if name.startswith(incomplete)]


def cluster_names(incomplete: str) -> list[str]:
    from tapas.hardware.cluster_files import clusters

    return [name for name in clusters() if name.startswith(incomplete)]
