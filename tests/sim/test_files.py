"""Files are written whole, beside nobody else's, and refused before the work."""
from __future__ import annotations

import os

import pytest

from sim import machine, units
from sim.errors import UserError
from sim.files import claimed, folder, writable, write


def test_a_file_is_replaced_and_its_neighbours_stay(tmp_path):
    (tmp_path / "n.part").write_text("keep")
    write(tmp_path / "n.json", "new")
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"n.part": "keep", "n.json": "new"}


def test_a_pipe_is_written_to_and_stays_one(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write(tmp_path / "pipe", "text")
    assert os.read(reader, 9) == b"text" and (tmp_path / "pipe").is_fifo()
    os.close(reader)


def test_what_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    for call in (lambda: writable(tmp_path / "x" / "y"), lambda: writable(tmp_path), lambda: folder(tmp_path / "file"),
                 lambda: folder(tmp_path / "file" / "sub"), lambda: writable(tmp_path / ("n" * 300))):
        with pytest.raises(UserError):
            call()


@pytest.mark.parametrize("text", ("9" * 400, "2" * 20 + "G"))
def test_huge_numbers_are_refused_and_large_ones_exact(text):
    with pytest.raises(UserError, match="more than 2"):
        units.parse_tokens(text)
    assert units.parse_tokens("1099511627775") == (1 << 40) - 1


@pytest.mark.parametrize("old, new", (('"fits": {}', '"fits": null'), ('"slowdown": {}', '"slowdown": [1]'), ('"fits": {}', '"fits": {"attn": 5}'), ("989", "1" + "0" * 400)))
def test_a_machine_of_another_form_is_refused_in_a_line(tmp_path, old, new):
    machine.machine("h100-80g-sxm").save(tmp_path / "m.json")
    content = (tmp_path / "m.json").read_text()
    assert old in content
    (tmp_path / "m.json").write_text(content.replace(old, new))
    with pytest.raises(UserError) as error:
        machine.load(tmp_path / "m.json")
    assert "\n" not in str(error.value)


def test_a_folder_is_one_run_s_at_a_time(tmp_path):
    with claimed(tmp_path / "out"):
        with pytest.raises(UserError, match="another run"), claimed(tmp_path / "out"):
            pass
    with claimed(tmp_path / "out"):
        pass


def test_a_folder_whose_lock_cannot_be_opened_is_refused(tmp_path):
    (tmp_path / ".lock").mkdir()
    with pytest.raises(UserError, match=r"\.lock cannot be written \(Is a directory\); name a folder of your own"), claimed(tmp_path):
        pass
