"""Records keep names of files, without the folders of one machine."""

import pytest

from raylt.studies.settings import file_names


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        ("npz:/home/a/data.npz", "npz:data.npz"),
        ("folder:data/shops", "folder:shops"),
        ("ray:/mnt/images", "ray:images"),
        ("/home/a/w.pt", "w.pt"),
        ("~/w:1.pt", "w:1.pt"),
        ("clip:ViT-B-32/openai:/home/a/clip.pt", "clip:ViT-B-32/openai:clip.pt"),
        ("ray:s3://bucket/a", None),
        ("data/w.pt", None),
        ("timm:resnet18", None),
    ],
)
def test_a_path_of_this_machine_is_replaced_by_the_files_name(value, kept):
    assert file_names({"section": {"setting": value}}) == ({} if kept is None else {value: kept})
