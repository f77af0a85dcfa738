"""Video files and folders of them: the right frame at the right time, and what cannot be read said so."""

from __future__ import annotations

import pickle
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from clips import RATE, colour_video, write_video
from PIL import Image

from diptych.data.check import check
from diptych.data.decode import video_files
from diptych.data.decode.extra_formats import VIDEO_SUFFIXES, is_video
from diptych.data.decode.video_files import Video, clock, sample_times
from diptych.data.formats import open_captions, recognise
from diptych.data.readers.folder import FrameImages
from diptych.errors import ImageError, MissingExtra, SettingsError

COLOURS = {"red": (255, 0, 0), "lime": (0, 255, 0), "blue": (0, 0, 255), "white": (255, 255, 255)}


def colour_of(picture: Image.Image) -> str:
    mean = np.asarray(picture, np.float64).reshape(-1, 3).mean(0)
    return min(COLOURS, key=lambda name: float(np.abs(mean - COLOURS[name]).sum()))


@pytest.mark.parametrize(("suffix", "codec"), [(".mp4", "mpeg4"), (".mp4", "libx264"), (".mkv", "mpeg4")])
def test_the_frame_of_each_time_is_the_one_shown_then(tmp_path: Path, suffix: str, codec: str) -> None:
    frames = [Image.new("RGB", (32, 32), colour) for colour in COLOURS for _ in range(RATE)]
    path = write_video(tmp_path / f"clip{suffix}", frames, codec=codec)
    wanted = {
        0.0: "red",
        0.5: "red",
        0.99: "red",
        1.0: "lime",
        1.9: "lime",
        2.0: "blue",
        3.1: "white",
        9.0: "white",
    }
    with Video(path) as video:
        assert video.duration == pytest.approx(4.0, abs=0.3)
        for time, colour in wanted.items():
            assert colour_of(video.frame(time)) == colour
        for time in (3.1, 0.0, 2.0, 1.0, 1.0):  # back and forth, and twice the same
            assert colour_of(video.frame(time)) == wanted[time]
        assert video.frame(0).size == (32, 32)


def test_asking_in_order_decodes_each_frame_once(tmp_path: Path) -> None:
    path = colour_video(tmp_path / "clip.mp4", COLOURS, seconds=2)
    with Video(path) as video:
        sought = []
        seek = video._seek
        video._seek = lambda time: (sought.append(time), seek(time))[1]  # type: ignore[func-returns-value, method-assign]
        for n in range(8):
            video.frame(float(n))
        assert sought == [0.0]
        video.frame(1.0)
        assert sought == [0.0, 1.0]


def test_times_cover_a_video_and_stay_before_its_end() -> None:
    assert sample_times(4.0, 1.0, 600) == [0, 1, 2, 3]
    assert sample_times(4.2, 1.0, 600) == [0, 1, 2, 3, 4]
    assert sample_times(0.0, 1.0, 600) == [0]
    assert sample_times(0.3, 1.0, 600) == [0]
    assert sample_times(100.0, 1.0, 10) == [10.0 * n for n in range(10)]
    for duration in (0.1, 3.3, 7.0, 59.9, 7201.5):
        for every in (0.5, 1.0, 3.0):
            times = sample_times(duration, every, 50)
            assert len(times) <= 50
            assert times[-1] < duration
            assert times == sorted(set(times))


def test_clocks_read_like_those_of_players() -> None:
    assert [clock(t) for t in (0, 7.9, 60, 754, 3723)] == ["0:00", "0:07", "1:00", "12:34", "1:02:03"]


def test_a_folder_of_videos_is_a_collection_of_frames(tmp_path: Path) -> None:
    colour_video(tmp_path / "val" / "b.mp4", ["blue", "white"])
    colour_video(tmp_path / "a.mp4", ["red", "lime"])
    (tmp_path / "a.txt").write_text("first red, then green\n\na traffic light\n")
    Image.new("RGB", (8, 8), "white").save(tmp_path / "still.png")
    assert recognise(tmp_path) == "videos"
    captions = open_captions(tmp_path)
    assert list(captions.image_ids) == [
        "a.mp4#t=0",
        "a.mp4#t=1",
        "still.png",
        "val/b.mp4#t=0",
        "val/b.mp4#t=1",
    ]
    assert list(captions.splits) == ["train"] * 3 + ["val"] * 2
    assert list(captions.labels["video"]) == ["a.mp4", "a.mp4", None, "val/b.mp4", "val/b.mp4"]
    assert list(captions.labels["time"]) == [0, 1, None, 0, 1]
    assert list(captions.texts) == ["first red, then green", "a traffic light"]
    assert captions.image_of.tolist() == [0, 0]
    colours = [colour_of(captions.images[n]) for n in range(5)]  # type: ignore[arg-type]
    assert colours == ["red", "lime", "white", "blue", "white"]
    keys = [captions.images.content_key(n) for n in range(5)]
    assert len(set(keys)) == 5
    again = pickle.loads(pickle.dumps(captions.images))  # as a worker gets it
    assert [again.content_key(n) for n in range(5)] == keys
    assert colour_of(again[1]) == "lime"


def test_options_set_the_distance_and_the_number_of_frames(tmp_path: Path) -> None:
    colour_video(tmp_path / "a.mp4", COLOURS)
    assert len(open_captions(f"{tmp_path}?every=0.5").images) == 8
    assert len(open_captions(f"{tmp_path}?every=2").images) == 2
    assert len(open_captions(tmp_path, most=3).images) == 3
    for every in ("0", "fast", "-1", "nan", "inf"):
        with pytest.raises(SettingsError, match=r"0\.01"):
            open_captions(f"{tmp_path}?every={every}")
    with pytest.raises(SettingsError, match=r"\b1\b"):
        open_captions(tmp_path, most=0)


def test_a_damaged_video_says_so_when_it_is_read(tmp_path: Path) -> None:
    good = colour_video(tmp_path / "good.mp4", ["red"])
    (tmp_path / "noise.mp4").write_bytes(b"no video at all" * 100)
    (tmp_path / "empty.mp4").write_bytes(b"")
    (tmp_path / "half.mp4").write_bytes(good.read_bytes()[:600])
    captions = open_captions(tmp_path)
    assert list(captions.image_ids) == ["empty.mp4#t=0", "good.mp4#t=0", "half.mp4#t=0", "noise.mp4#t=0"]
    for row in (0, 2, 3):
        with pytest.raises(ImageError):
            captions.images[row]
    assert colour_of(captions.images[1]) == "red"  # type: ignore[arg-type]
    errors = [str(problem) for problem in check(tmp_path).problems if problem.severity == "error"]
    for name in ("noise.mp4", "empty.mp4", "half.mp4"):
        assert any(f"{name} cannot be read as a video" in error for error in errors)
    assert not any("good.mp4" in error for error in errors)
    with pytest.raises(ImageError, match=r"gone\.mp4"):
        Video(tmp_path / "gone.mp4")


def test_a_playlist_in_the_clothes_of_a_video_is_not_followed(tmp_path: Path) -> None:
    secret = colour_video(tmp_path / "secret.mp4", ["red"])
    disguised = {
        "hls.mp4": f"#EXTM3U\n#EXT-X-TARGETDURATION:5\n#EXTINF:5,\n{secret}\n#EXT-X-ENDLIST\n",
        "concat.mp4": f"ffconcat version 1.0\nfile {secret}\n",
    }
    for name, text in disguised.items():
        (tmp_path / name).write_text(text)
        with pytest.raises(ImageError):
            Video(tmp_path / name)


def test_a_sound_file_has_no_frames(tmp_path: Path) -> None:
    import av

    path = tmp_path / "sound.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("aac", rate=44100)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 44100
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    with pytest.raises(ImageError, match=r"sound\.mp4"):
        Video(path)


def test_without_the_library_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    colour_video(tmp_path / "films" / "a.mp4", ["red"])
    shutil.copytree(tmp_path / "films", tmp_path / "mixed")
    Image.new("RGB", (8, 8)).save(tmp_path / "mixed" / "still.png")
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(MissingExtra, match=r"diptych\[video\]"):
        open_captions(tmp_path / "films")
    assert (
        recognise(tmp_path / "mixed") == "folder"
    )  # the pictures can be read, and the check tells of the rest
    assert any("a.mp4" in p.message and "video" in p.expected for p in check(tmp_path / "mixed").problems)


def test_names_tell_videos_from_other_files() -> None:
    assert is_video("a/B.MP4")
    assert not is_video("a/._b.mp4")
    assert not is_video("a/b.jpg")
    assert all(suffix.startswith(".") for suffix in VIDEO_SUFFIXES)


def test_frames_are_turned_upright(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Frame:
        rotation = -90  # as a phone held upright writes it: a quarter turn clockwise

        def to_image(self) -> Image.Image:
            wide = Image.new("RGB", (4, 2), "white")
            wide.putpixel((0, 0), (255, 0, 0))
            return wide

    turned = video_files._upright(Frame())
    assert turned.size == (2, 4)
    assert turned.getpixel((1, 0)) == (255, 0, 0)  # the upper left corner goes to the upper right


def test_frames_too_large_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = colour_video(tmp_path / "a.mp4", ["red"])
    monkeypatch.setattr(video_files, "MAX_PIXELS", 1000)
    with pytest.raises(ImageError, match=r"a\.mp4"):
        Video(path)


def test_one_video_stays_open_at_a_time(tmp_path: Path) -> None:
    for name in ("a.mp4", "b.mp4"):
        colour_video(tmp_path / name, ["red"])
    store = FrameImages(tmp_path, ["a.mp4", "b.mp4"], [0.0, 0.0])
    assert colour_of(store[0]) == colour_of(store[1]) == colour_of(store[0]) == "red"  # type: ignore[arg-type]
    assert store._open is not None
    assert store._open.path.name == "a.mp4"
