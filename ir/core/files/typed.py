"""Plain values to typed ones: a class's annotations say what a file may hold, and errors are read off them."""

import math
from collections.abc import Collection, Mapping, Sequence
from threading import Lock
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import inspect as types

from ir.core.errors import PiperError, converted, nearest
from ir.core.files.read import FileErrors, cut
from ir.core.synonyms import advice, synonym

Text = Annotated[str, msgspec.Meta(max_length=1024)]
HIDDEN = msgspec.Meta(extra={"hidden": True})  # a field that no file has
T = TypeVar("T")
Extra = Mapping[str, Any]
_NONE: Extra = {}
_KNOWN: dict[object, types.Type] = {}
_FINDING = Lock()  # out what there is to know: see `resolve_types`
_NAMES: Mapping[type, str] = {types.BoolType: "true or false", types.NoneType: "nothing", types.DictType: "a table"}
_KINDS: Mapping[type, str] = {
    types.BoolType: "truth value",
    types.IntType: "integer",
    types.FloatType: "number",
    types.StrType: "text",
    types.ListType: "list",
    types.VarTupleType: "list",
    types.TupleType: "list",
}


def words(*known: str, said: str = "word") -> msgspec.Meta:
    """The only texts that an `Annotated[str, words(…)]` may hold. said: what they are, for errors.

    >>> from ir.core.errors import ErrorKind
    >>> typed({"a": "bf61"}, dict[str, Annotated[str, words("bf16", "fp8")]], FileErrors("a file", ErrorKind.JOB, "x"))
    Traceback (most recent call last):
    ...
    ir.core.errors.PiperError: a: unknown word 'bf61'
    allowed: bf16, fp8
    fix: a = "bf16"
    """
    return msgspec.Meta(extra={"words": known, "said": said})


def resolve_types(*kinds: object) -> None:
    """Have msgspec find out all about types that threads will read: it shows them to the next who asks before it knows
    them whole, and ranks that are threads, and ask at once for the first time, have crashed in it.
    """
    for kind in kinds:
        msgspec.json.Decoder(kind)


def typed(
    value: object,
    wanted: type[T],
    form: FileErrors,
    file: str | None = None,
    at: str = "",
    beside: Collection[str] = (),
) -> T:
    """A plain value as `wanted`: a Struct, a dataclass, or made of them. Raises PiperError naming the first wrong key.

    at: where the value stands in the file. Keys that a class does not have are refused, with the nearest that it has.
    beside: keys that may stand in the same table and are read by another class; a typo may be of one of them.
    """
    kind = _type(wanted)
    _Check(form, file, at, beside, kind).value(value, kind, at, _NONE)
    try:
        return msgspec.convert(value, wanted, strict=True)
    except msgspec.ValidationError as e:  # of a class's own __post_init__
        raise form.wrong(str(e), file, at, None) from None


def _type(wanted: object) -> types.Type:
    if wanted not in _KNOWN:
        with _FINDING:
            resolve_types(wanted)
            _KNOWN[wanted] = types.type_info(wanted)
    return _KNOWN[wanted]


class _Check:
    """The values of one file against their types, in the order of the file."""

    def __init__(
        self, form: FileErrors, file: str | None, top: str, beside: Collection[str], whole: types.Type
    ) -> None:
        self.form, self.file, self.top, self.beside, self.whole = form, file, top, beside, whole

    def wrong(self, at: str, message: str, t: types.Type, extra: Extra = _NONE, fix: str | None = None) -> PiperError:
        return self.form.wrong(message, self.file, at, allowed(t, extra), fix)

    def value(self, x: object, t: types.Type, at: str, extra: Extra) -> None:
        """Raises PiperError where x is no t."""
        t, extra = _bare(t, extra)
        match t:
            case types.UnionType():
                self.union(x, t, at)
            case types.StructType() | types.DataclassType():
                self.table(x, t, at)
            case types.DictType() if isinstance(x, Mapping):
                for k, v in x.items():
                    self.key(k, t.key_type, at)
                    self.value(v, t.value_type, _inside(at, k), _NONE)
            case types.ListType() | types.VarTupleType() | types.TupleType() if _is_list(x):
                self.items(x, t, at, extra)  # type: ignore[arg-type]
            case types.AnyType() | types.CustomType():
                self.plain(x, at)
            case _:
                if not _fits(x, t, extra):
                    raise self.mismatch(x, t, at, extra)

    def key(self, k: object, t: types.Type, at: str) -> None:
        bare, extra = _bare(t, _NONE)
        if not _fits(k, bare, extra):
            near = nearest(str(k), extra.get("words", ()))
            what = f"unknown {extra.get('said', 'key')} {cut(k)}"
            raise self.wrong(_inside(at, k), what, t, fix=_inside(at, near) if near else None)

    def union(self, x: object, t: types.UnionType, at: str) -> None:
        """Judged as the first of the options whose JSON type it has."""
        options = [o for o in t.types if not isinstance(o, types.NoneType)]
        if x is None and len(options) < len(t.types):
            return
        for o in options:
            if _alike(x, _bare(o, _NONE)[0]):
                return self.value(x, o, at, _NONE)
        if len(options) == 1:
            return self.value(x, options[0], at, _NONE)
        raise self.mismatch(x, t, at, _NONE)

    def table(self, x: object, t: types.StructType | types.DataclassType, at: str) -> None:
        if not isinstance(x, Mapping):
            raise self.mismatch(x, t, at, _NONE)
        known = {f.encode_name: f for f in t.fields if not _bare(f.type, _NONE)[1].get("hidden")}
        for k, v in x.items():
            if k not in known:
                others = [key for key in self.beside if key not in known] if at == self.top else []
                near = converted(str(k), v, known) or nearest(str(k), [*known, *others])
                fix = _inside(at, near) if near else self.elsewhere(str(k)) or advice(str(k))
                may = ", ".join([allowed(t), *others])
                raise self.form.wrong("unknown key", self.file, _inside(at, k), may, fix)
        for k, f in known.items():
            if f.required and k not in x:
                raise self.wrong(_inside(at, k), "missing", f.type)
        for k, v in x.items():
            self.value(v, known[k].type, _inside(at, k), _NONE)

    def elsewhere(self, word: str) -> str | None:
        """The one table of the file that has this key, or one that means the same, and the key."""
        found = []
        for table in _fields(self.whole):
            keys = [f.encode_name for f in _fields(table.type)]
            same = (word,) if word in keys else synonym(word, keys) or ()
            found += [_inside(_inside(self.top, table.encode_name), k) for k in same]
        return found[0] if len(found) == 1 else None

    def items(self, x: Sequence[object], t: types.Type, at: str, extra: Extra) -> None:
        """Of a list. What is wrong with a number or word in it is laid at the list, which is what one has to mend."""
        if isinstance(t, types.TupleType):
            inner = t.item_types
            if len(x) != len(inner):
                raise self.wrong(at, f"{len(x)} values", t, extra)
        else:
            assert isinstance(t, types.ListType | types.VarTupleType)
            inner = (t.item_type,) * len(x)
            if len(x) < (t.min_length or 0):
                raise self.wrong(at, f"{len(x)} values", t, extra, extra.get("fix"))
        for i, (v, item) in enumerate(zip(x, inner, strict=True)):
            leaf = not isinstance(_bare(item, _NONE)[0], types.StructType | types.DataclassType)
            self.value(v, item, at if leaf else f"{at}[{i}]", _NONE)

    def plain(self, x: object, at: str) -> None:
        """Any value; texts within reason."""
        if isinstance(x, str):
            self.value(x, _type(Text), at, _NONE)
        for k, v in x.items() if isinstance(x, Mapping) else ():
            self.plain(k, at)
            self.plain(v, _inside(at, k))
        for v in x if isinstance(x, list | tuple) else ():
            self.plain(v, at)

    def mismatch(self, x: object, t: types.Type, at: str, extra: Extra) -> PiperError:
        if isinstance(x, str) and isinstance(t, types.StrType):
            near = nearest(x, extra.get("words", ()))
            what = f"unknown {extra['said']} {cut(x)}" if "words" in extra else f"{cut(x)} is no plain text"
            return self.wrong(at, what, t, extra, f'{at} = "{near}"' if near else None)
        if _alike(x, t) and isinstance(x, int | float):
            return self.wrong(at, f"{cut(x)} is out of range", t, extra, _into_range(x, t, at))
        return self.wrong(at, f"{cut(x)} is no {_kind(t)}", t, extra, _as_wanted(x, t, at))


def _bare(t: types.Type, extra: Extra) -> tuple[types.Type, Extra]:
    """A type without what was annotated, and that."""
    while isinstance(t, types.Metadata):
        extra, t = {**extra, **(t.extra or {})}, t.type
    return t, extra


def _fields(t: types.Type) -> Sequence[types.Field]:
    """Of a table with keys of its own, also of one that may be left out; none of anything else."""
    bare = _bare(t, _NONE)[0]
    if isinstance(bare, types.UnionType):
        return [f for option in bare.types for f in _fields(option)]
    return bare.fields if isinstance(bare, types.StructType | types.DataclassType) else ()


def _inside(at: str, key: object) -> str:
    return f"{at}.{key}" if at else str(key)


def _is_list(x: object) -> bool:
    return isinstance(x, Sequence) and not isinstance(x, str)


def _alike(x: object, t: types.Type) -> bool:
    """Whether x has the JSON type of t, whatever its value."""
    match t:
        case types.BoolType():
            return isinstance(x, bool)
        case types.IntType():
            return isinstance(x, int) and not isinstance(x, bool)
        case types.FloatType():
            return isinstance(x, int | float) and not isinstance(x, bool)
        case types.StrType() | types.EnumType() | types.LiteralType():
            return isinstance(x, str)
        case types.ListType() | types.VarTupleType() | types.TupleType():
            return _is_list(x)
        case types.NoneType():
            return x is None
        case _:
            return isinstance(x, Mapping)


def _fits(x: Any, t: types.Type, extra: Extra) -> bool:
    """Whether x is a t, which has nothing inside."""
    if not _alike(x, t):
        return False
    match t:
        case types.IntType() | types.FloatType():
            low = (t.ge is None or x >= t.ge) and (t.gt is None or x > t.gt)
            return math.isfinite(x) and low and (t.le is None or x <= t.le) and (t.lt is None or x < t.lt)
        case types.StrType():
            short = t.max_length is None or len(x) <= t.max_length
            return short and x.isprintable() and ("words" not in extra or x in extra["words"])
        case types.EnumType():
            return x in [e.value for e in t.cls]
        case types.LiteralType():
            return x in t.values
        case _:
            return True


def allowed(t: types.Type, extra: Extra = _NONE) -> str:
    """What a type takes, in words.

    >>> allowed(_type(Annotated[int, msgspec.Meta(ge=1)])), allowed(_type(tuple[str, ...] | None))
    ('an integer from 1 up', 'a list of text')
    """
    t, extra = _bare(t, extra)
    match t:
        case types.UnionType():
            return " or ".join(allowed(o) for o in t.types if not isinstance(o, types.NoneType))
        case types.IntType() | types.FloatType():
            return f"{'an integer' if isinstance(t, types.IntType) else 'a finite number'}{_range(t)}"
        case types.StrType() if "words" in extra:
            return ", ".join(extra["words"])
        case types.StrType():
            return "text" if t.max_length is None else f"text of at most {t.max_length} characters"
        case types.EnumType():
            return ", ".join(str(e.value) for e in t.cls)
        case types.LiteralType():
            return ", ".join(map(str, t.values))
        case types.StructType() | types.DataclassType():
            keys = [f.encode_name for f in t.fields if not _bare(f.type, _NONE)[1].get("hidden")]
            return f"a table of {', '.join(keys)}"
        case types.TupleType():
            return f"a list of {len(t.item_types)}: {'; '.join(map(allowed, t.item_types))}"
        case types.ListType() | types.VarTupleType():
            return f"a list of {allowed(t.item_type)}" + (f", at least {t.min_length}" if t.min_length else "")
        case _:
            return _NAMES.get(type(t), "any value")


def _kind(t: types.Type) -> str:
    t, _ = _bare(t, _NONE)
    if isinstance(t, types.UnionType):
        return " or ".join(_kind(o) for o in t.types if not isinstance(o, types.NoneType))
    return _KINDS.get(type(t), "table")


def _range(t: types.IntType | types.FloatType) -> str:
    low = f" from {t.ge}" if t.ge is not None else f" more than {t.gt}" if t.gt is not None else ""
    if t.le is None and t.lt is None:
        return low + (" up" if t.ge is not None else "")
    high = f"{t.le}" if t.le is not None else f"below {t.lt}"
    return f"{low} to {high}" if t.le is not None and low else f"{low}{' and' if low else ''} {high}"


def _into_range(x: float, t: types.Type, at: str) -> str | None:
    """The end of a closed range of integers that was overstepped."""
    if not isinstance(t, types.IntType):
        return None
    end = t.ge if t.ge is not None and x < t.ge else t.le if t.le is not None and x > t.le else None
    return None if end is None else f"{at} = {end}"


def _as_wanted(x: object, t: types.Type, at: str) -> str | None:
    """The same value in the type that is wanted, where it is beyond doubt."""
    options = [_bare(o, _NONE)[0] for o in t.types] if isinstance(t, types.UnionType) else [t]
    kinds = {type(o) for o in options}
    if types.BoolType in kinds and str(x).lower() in ("0", "1", "true", "false"):
        return f"{at} = {'true' if str(x).lower() in ('1', 'true') else 'false'}"
    if types.IntType in kinds and isinstance(x, str | float) and not isinstance(x, bool):
        whole = x.isascii() and x.isdigit() and len(x) < 19 if isinstance(x, str) else x.is_integer()
        return f"{at} = {int(x)}" if whole else None
    if types.StrType in kinds and isinstance(x, int | float) and not isinstance(x, bool):
        return f'{at} = "{x}"'
    return None
