"""Every name that a flag takes, by kind; nothing is imported until a name is used.

A line here is all that a thing of this package needs to be named: flags, help pages, messages and the tables of the
docs follow. Other packages add names with entry points of the group ``diptych.KIND`` (docs/extending.md).
"""

from __future__ import annotations

from diptych.names import Entry, Registry


def _entry(name: str, help: str, target: str, section: str = "") -> Entry:
    """A thing of this package."""
    return Entry(name, help, f"diptych.{target}", section)


_BACKBONES = ("hf:ID", "timm:NAME", "a model folder")
_TEXTS = ("hf:ID", "a model folder")

IMAGE_ENCODERS = Registry(
    "image encoder",
    "image_encoders",
    [
        _entry("auto", "regions or grid for stored features, lite0 for pictures", "model.named:image_side"),
        _entry("regions", "stored region features", "encoders.regions:Regions"),
        _entry("grid", "stored grid features, or one vector per image", "encoders.cnn:PrecomputedGrid"),
        _entry("lite0", "EfficientNet-Lite0", "encoders.lite0:Lite0"),
    ],
    forms=_BACKBONES,
    bases=("diptych.encoders.encoder:Encoder", "diptych.encoders.encoder:Backbone"),
)

TEXT_ENCODERS = Registry(
    "text encoder",
    "text_encoders",
    [
        _entry("bigru", "a bidirectional GRU over word vectors", "encoders.bigru:BiGRU"),
        _entry("gru", "a GRU in one direction, its last state", "encoders.bigru:UniGRU"),
        _entry("minilm", "all-MiniLM-L6-v2 (extra 'demo')", "encoders.transformer:TransformerText"),
    ],
    forms=_TEXTS,
    bases=("diptych.encoders.encoder:Encoder",),
)

BACKBONES = Registry(
    "backbone",
    "backbones",
    [_entry("lite0", "EfficientNet-Lite0", "encoders.lite0:Lite0")],
    forms=_BACKBONES,
    bases=("diptych.encoders.encoder:Backbone",),
)

POOLINGS = Registry(
    "pooling",
    "poolings",
    [
        _entry("gpo", "generalized pooling, learned (VSE∞)", "model.named:gpo"),
        _entry("mean", "the mean", "aggregators:Mean"),
        _entry("max", "the maximum of each channel", "aggregators:Max"),
        _entry("kmax", "the mean of the k largest values of each channel", "model.named:kmax"),
        _entry("first", "the first element, such as a transformer's CLS token", "aggregators:First"),
        _entry("gem", "the generalised mean with a learned power", "aggregators:GeM"),
    ],
    bases=("diptych.aggregators:Aggregator",),
)

IMAGE_TEACHERS = Registry(
    "image teacher",
    "image_teachers",
    [
        _entry("lite0", "EfficientNet-Lite0", "encoders.lite0:Lite0"),
        _entry("auto", "stored for stored features, lite0 for pictures", "training.teachers:Teachers"),
        _entry("stored", "the mean of stored features", "targets.teachers:StoredTeacher"),
    ],
    forms=(*_BACKBONES, "a file of vectors"),
    bases=("diptych.encoders.encoder:Backbone",),
)

TEXT_TEACHERS = Registry(
    "text teacher",
    "text_teachers",
    [_entry("minilm", "all-MiniLM-L6-v2 (extra 'demo')", "encoders.transformer:TransformerText")],
    forms=_TEXTS,
    bases=("diptych.targets.teachers:TextTeacher",),
)

OBJECTIVES = Registry(
    "objective",
    "objectives",
    [
        _entry("triplet", "VSE∞'s hinge on the hardest negatives", "objectives.triplet:triplet"),
        _entry("info_nce", "InfoNCE with a learned temperature", "objectives.contrastive:learned_info_nce"),
        _entry("visual", "COOKIE's images against augmented images", "objectives.contrastive:visual"),
        _entry("textual", "COOKIE's texts against augmented texts", "objectives.contrastive:textual"),
        _entry("dcl", "CODER's diversity-sensitive contrast", "objectives.diversity:dcl"),
        _entry("dcl_i", "the same without the diversity (HAL)", "objectives.diversity:dcl_i"),
        _entry("m_dcl", "CODER's contrast against a twin's queues", "objectives.diversity:m_dcl"),
        _entry("prototypes", "CODER's classes of clustered pairs", "objectives.prototypes:prototypes"),
        _entry("csa", "CUSA's cross-modal soft labels", "objectives.soft_labels:CrossModalSoftLabels"),
        _entry("usa", "CUSA's uni-modal soft labels", "objectives.soft_labels:UniModalSoftLabels"),
        _entry("itc", "contrast at a fusion encoder's temperature", "objectives.contrastive:ITC"),
        _entry("itm", "matching of pairs by a fusion encoder", "objectives.contrastive:ITM"),
        _entry("label", "label-wise: the labels of both sides", "objectives.labels:LabelLoss"),
        _entry("consistency", "label-wise: rows that share labels", "objectives.labels:Consistency"),
        _entry("masked", "label-wise: masked words and regions", "objectives.labels:MaskedPrediction"),
        _entry("csq", "codes drawn to the centres of their classes", "objectives.labels:csq"),
    ],
    forms=("own",),
    bases=("diptych.objectives.objective:Objective",),
    terms=True,
)

PROTOCOLS = Registry(
    "protocol",
    "protocols",
    [
        _entry("plain", "every image and text at once", "evaluation.protocols:PLAIN"),
        _entry("flickr30k", "the 1,000 test images of Flickr30K", "evaluation.protocols:FLICKR30K"),
        _entry("coco-1k", "five folds of 1,000 COCO test images", "evaluation.protocols:COCO_1K"),
        _entry("coco-5k", "the 5,000 test images of COCO", "evaluation.protocols:COCO_5K"),
        _entry("video", "videos and their different texts", "evaluation.video:VideoRetrieval"),
        _entry("hashing", "MAP@5000 of codes", "evaluation.hashing:HashRetrieval"),
        _entry("sts", "text matching on SentEval's data", "evaluation.sts:Sts"),
        _entry("image-classes", "images of the same class", "evaluation.uni_modal:ImageClasses"),
        _entry("four-directions", "image and text, each against each", "evaluation.uni_modal:FourDirections"),
    ],
)

JUDGEMENTS = Registry(
    "set of judgements",
    "judgements",
    [
        _entry("eccv", "ECCV Caption (extra 'eccv')", "evaluation.judgements:eccv"),
        _entry("cxc", "Crisscrossed Captions (extra 'eccv')", "evaluation.judgements:cxc"),
        _entry("coco", "COCO's own pairs (extra 'eccv')", "evaluation.judgements:coco"),
    ],
    forms=("a file of corrections (.csv)",),
)


def _reader(name: str, help: str, signs: str = "", target: str = "") -> Entry:
    """A format: the ``READER`` of the module of its name, unless said otherwise.

    ``signs`` are endings, one of which a name in the folder or that of the file has (``NAME/``: a folder). A reader is
    imported only where one of them is found, or where it has none.
    """
    target = target or f"{name.replace('-', '_')}:READER"
    return Entry(name, help, f"diptych.data.readers.{target}", signs=tuple(signs.split()))


READERS = Registry(
    "format",
    "readers",
    [  # in the order they are tried: the more particular first
        _reader("emoji", "the word 'emoji': OpenMoji pictures with English names", "emoji", "emoji"),
        _reader(
            "huggingface",
            "a folder written by save_to_disk (extra 'hf-datasets')",
            "dataset_dict.json state.json",
        ),
        _reader(
            "precomputed",
            "a folder with train_ims.npy, train_caps.txt (or .tsv), train_ids.txt, ..., or precomp/ with them; or with "
            "pictures and id_mapping.json in the place of arrays",
            "_ims.npy _caps.txt _caps.tsv precomp/",
        ),
        _reader(
            "hashing",
            "test.txt, database.txt and train.txt: an image and one 0 or 1 per class in each line",
            "test.txt",
            "hashing_lists:READER",
        ),
        _reader(
            "hgr",
            "annotation/RET/ref_captions.json, public_split and ordered_feature: videos as HGR stores them "
            "(extra 'hdf5')",
            "annotation/",
            "video_folders:HGR",
        ),
        _reader(
            "dual-encoding",
            "TextData/*.caption.txt and FeatureData: videos as dual_encoding stores them",
            "/",
            "video_folders:DUAL_ENCODING",
        ),
        _reader(
            "video-json",
            "the JSON of MSR-VTT (1k-A with MSRVTT_JSFUSION_test.csv) or VATEX, and VIDEO.npy files",
            ".json",
        ),
        _reader(
            "label-arrays",
            "train_preim.npy, train_tag.mat, train_label.mat, ...: regions, tags and labels (extra 'mat')",
            "_tag.mat",
        ),
        _reader(
            "mirflickr",
            "mirflickr25k_annotations_v080, meta/tags and pictures: MIRFlickr25K",
            "meta/ mirflickr/",
            "tag_sets:MIRFLICKR",
        ),
        _reader(
            "nus-wide",
            "ImageList, Groundtruth/AllLabels, NUS_WID_Tags and pictures: NUS-WIDE",
            "imagelist/",
            "tag_sets:NUS_WIDE",
        ),
        _reader(
            "webdataset",
            "a folder of .tar files, one of them, or a pattern (train-{0000..0009}.tar)",
            ".tar .tar.gz .tgz .tar.bz2 .tar.xz .tar.zst",
        ),
        _reader(
            "questions",
            "questions of VQA 2.0 (v2_OpenEnded_mscoco_train2014_questions.json) or GQA, and images",
            ".json",
            "pretraining:QUESTIONS",
        ),
        _reader(
            "web-table",
            "a table of texts and addresses (Conceptual Captions .tsv, SBU .json or .txt), and the pictures downloaded",
            ".tsv sbu-captions-all.json _urls.txt dataset/",
            "pretraining:WEB_TABLES",
        ),
        _reader(
            "corpora", "a .json that lists corpora (tars, or any data set) with weights", ".json", "corpora"
        ),
        _reader(
            "karpathy",
            "dataset_coco.json or dataset_flickr30k.json and images",
            ".json",
            "annotations:KARPATHY",
        ),
        _reader(
            "lists",
            "JSON lists per split (train.json, ...) of image and caption, or captions by image name",
            ".json",
            "annotations:LISTS",
        ),
        _reader(
            "manifest", "a .csv, .tsv or .jsonl with an image column, and images", ".csv .tsv .jsonl .txt"
        ),
        _reader(
            "parquet",
            "a .parquet with a column of image paths, a folder or a pattern of them (extra 'parquet')",
            ".parquet",
        ),
        _reader(
            "videos",
            "a folder of videos, and images beside them: frames at equal distances (extra 'video')",
            target="folder:VIDEOS",
        ),
        _reader("folder", "a folder of images, texts in .txt files beside them", target="folder:IMAGES"),
    ],
)


ENGINES = Registry(
    "engine for URLs of the scheme",
    "engines",
    [
        _entry("postgresql", "PostgreSQL (extra 'postgres')", "index.engines.postgres.index:PostgresIndex"),
        _entry("postgres", "the same, by its other name", "index.engines.postgres.index:PostgresIndex"),
        _entry("milvus", "Milvus (extra 'milvus')", "index.engines.milvus.index:MilvusIndex"),
    ],
    forms=("the path of a folder",),
    typed=False,
)
"""The engine of each scheme: a class with ``open``, ``create`` and ``exists``, as ``EmbeddedIndex``, for a URL."""

EXPORTERS = Registry(
    "exporter",
    "exporters",
    [
        _entry("vectors", "Export vectors as .npy and items as Parquet.", "cli.exchange:export_vectors"),
        _entry("faiss", "Export vectors as a faiss index of inner products.", "cli.exchange:export_faiss"),
        _entry(
            "runtime",
            "Write both encoders as ONNX, for searching without torch.",
            "cli.exchange:export_runtime",
        ),
        _entry(
            "onnx",
            "Copy the ONNX encoders of a model's runtime for other programs.",
            "cli.exchange:export_onnx",
        ),
    ],
    typed=False,
)


def _recipe(name: str, module: str = "", attribute: str = "RECIPE") -> Entry:
    """A recipe is ``RECIPE`` in the module of its name, unless said otherwise; its title stands in it."""
    return _entry(name, "", f"recipes.{module or name.replace('-', '_')}:{attribute}")


_RECIPES = (
    "ridge", "photos ridge PHOTOS", "vse-infinity", "vse-infinity-published vse_infinity PUBLISHED",
    "vse-plus-plus vse_infinity PLUS_PLUS", "coder", "coder-literal coder LITERAL", "scan", "cvse",
    "sgr sgraf SGR_RECIPE", "saf sgraf SAF_RECIPE", "labelwise", "vse-infinity-video vse_infinity VIDEO",
    "vse-plus-plus-video vse_infinity MEAN_VIDEO", "cookie", "cookie-match", "cookie-video cookie_match VIDEO",
    "cookie-hash", "clip", "fusion", "cusa-vse-infinity cusa", "cusa-clip cusa CLIP",
    "cusa-fusion cusa FUSION", "cusa-sgr cusa SGR", "cusa-saf cusa SAF",
)  # fmt: skip
RECIPES = Registry("recipe", "recipes", [_recipe(*words.split()) for words in _RECIPES], typed=False)
"""Recipes; only the one that is used is imported. A plugin adds its own: ``RECIPES["mine"] = Recipe(...)``."""


def _command(section: str, name: str, help: str, target: str) -> Entry:
    return _entry(name, help, f"cli.{target}", section)


COMMANDS = Registry(
    "command",
    "commands",
    [
        _command("data", "data", "Check data before training on it.", "data:data"),
        _command(
            "data", "audit", "List wrong pairs, missing positives, leaks and empty texts.", "evaluate:audit"
        ),
        _command("data", "extract", "Turn images into grid features (precomputed layout).", "data:extract"),
        _command("data", "teach", "Compute the teacher vectors of a data set once (CUSA).", "data:teach"),
        _command("data", "cache", "List or remove the computed features on disk.", "data:cache"),
        _command(
            "train", "demo", "Train two models on emoji pictures, search them, write a report.", "train:demo"
        ),
        _command("train", "train", "Train a recipe.", "train:train"),
        _command("train", "ablate", "Run the rows of a paper's table on your data.", "ablate:ablate"),
        _command("train", "reproduce", "Run a paper's table as it was published.", "ablate:reproduce"),
        _command(
            "evaluate",
            "evaluate",
            "Evaluate a run, a model folder or a pretrained model (hf:ID).",
            "evaluate:evaluate",
        ),
        _command("evaluate", "compare", "Compare two results, or several seeds of each.", "evaluate:compare"),
        _command("evaluate", "judge", "Check a claimed number: which protocol gives it?", "evaluate:judge"),
        _command("evaluate", "show", "Draw what models have learned.", "show:show"),
        _command("evaluate", "label", "Predict labels with a label-wise model.", "model:label"),
        _command("search", "index", "Make a collection searchable.", "index:index"),
        _command("search", "search", "Search by words, by an image's path, or by both.", "search:search"),
        _command("search", "serve", "Search an index in the browser and over HTTP.", "serve:serve"),
        _command("search", "watch", "Keep an index current while a folder changes.", "serve:watch"),
        _command("search", "embed", "Write the vectors of a large collection into files.", "embed:embed"),
        _command(
            "search", "plan", "Estimate bytes, FLOP, hours and money of a large collection.", "embed:plan"
        ),
        _command("exchange", "model", "Show or verify a model folder.", "model:model"),
        _command("exchange", "import", "Import models and vectors of other programs.", "exchange:import_"),
        _command("exchange", "export", "Export vectors and encoders for other programs.", "exchange:export"),
    ],
    typed=False,
)

REGISTRIES = (
    IMAGE_ENCODERS, TEXT_ENCODERS, BACKBONES, POOLINGS, IMAGE_TEACHERS, TEXT_TEACHERS, OBJECTIVES, PROTOCOLS,
    JUDGEMENTS, READERS, ENGINES, EXPORTERS, COMMANDS, RECIPES,
)  # fmt: skip
