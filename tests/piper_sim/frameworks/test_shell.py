"""What bash makes of a script's branches, defaults and leftover arguments: bash itself is asked what it would run."""

import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ir.job.build import prepare
from ir.job.load import job_from
from piper_sim.frameworks.importing import ASSUMED, UNDERSTOOD, UNKNOWN
from piper_sim.frameworks.shell import read_shell
from piper_sim.frameworks.sums import MAYBE_SET, UNSET
from tests.piper_sim.frameworks.test_import import TEXTS, imported, listed

LAUNCH = "torchrun --nproc_per_node 8 pretrain_gpt.py {} --hidden-size 64 --num-attention-heads 8 --seq-length 64"


def _shown(text: str, *, check: bool) -> list[str]:
    """What bash gives `run`, where nothing is set."""
    words = "run() { printf '%s\\n' \"$@\"; }\n"
    path = {"PATH": os.environ["PATH"]}
    done = subprocess.run(["bash", "-c", words + text], capture_output=True, text=True, check=check, env=path)
    return done.stdout.splitlines()


def layers(tmp_path: Path, text: str) -> int:
    return prepare(job_from(imported(tmp_path, text).job)).config.layers


BRANCHES = TEXTS["branches"]


@pytest.mark.parametrize("how", BRANCHES)
def test_the_branch_that_a_script_decides_is_taken(tmp_path: Path, how: str) -> None:
    for size, count in (("small", 4), ("large", 9), ("other", 2)):
        text = f"M={size}\n{BRANCHES[how]}\n{LAUNCH.format('--num-layers $N')}\n"
        assert layers(tmp_path, text) == count
        assert "--num-layers" in listed(imported(tmp_path, text), UNDERSTOOD)


def test_what_an_undecided_branch_sets_is_assumed_and_nothing_else(tmp_path: Path) -> None:
    text = """ARGS="--num-layers 4"
if [ -f checkpoint ]; then ARGS="$ARGS --recompute-granularity full"; fi
if [ "$SIZE" = big ]; then SEQ=128; else SEQ=64; fi
"""
    launch = LAUNCH.replace("64 ", "64 --bf16 ", 1).replace("--seq-length 64", "--seq-length $SEQ").format("$ARGS")
    found = imported(tmp_path, text + launch)
    assert listed(found, ASSUMED) == ["--recompute-granularity", "--seq-length"] and not listed(found, UNKNOWN)
    assert found.job["schedule"]["recompute"] == "full" and found.job["model"]["seq_len"] == 64
    assert not any(MAYBE_SET in str(e) or UNSET in str(e) for e in found.entries)


@pytest.mark.parametrize("rest", ['"$@"', "$@", '"${@:2}"', "$EXTRA_ARGS", "${OTHER_OPTS}", '"${EXTRA[@]}"', "${@}"])
@pytest.mark.parametrize("last", ["--num-layers 4", "--num-layers 4 --bf16"])
def test_arguments_that_the_script_is_given_spoil_no_other(tmp_path: Path, rest: str, last: str) -> None:
    text = LAUNCH.format("") + f" {last} {rest}\n"
    found = imported(tmp_path, text)
    assert not listed(found, UNKNOWN) and layers(tmp_path, text) == 4
    assert [a for a in listed(found, ASSUMED) if a.startswith("$")]
    assert "--bf16" not in last or found.job["precision"]["compute"] == "bf16"


@pytest.mark.parametrize("rest", ["$EXTRA", "${EXTRA:-}", '"${EXTRA-}"'])
def test_arguments_that_a_loop_collects_spoil_no_other(tmp_path: Path, rest: str) -> None:
    loop = 'while [ $# -gt 0 ]; do EXTRA+=" $1"; shift; done\n'
    found = imported(tmp_path, loop + LAUNCH.format("") + f" --num-layers 4 --bf16 {rest}\n")
    assert found.job["precision"]["compute"] == "bf16" and not listed(found, UNKNOWN)
    assert listed(found, ASSUMED)[-1] == "$EXTRA"


def test_a_value_that_is_not_in_the_file_stays_unknown(tmp_path: Path) -> None:
    found = imported(tmp_path, LAUNCH.format("--num-layers $N --tensor-model-parallel-size $1"))
    assert {"--num-layers", "--tensor-model-parallel-size"} == set(listed(found, UNKNOWN))


def test_a_condition_turned_round_thousands_of_times_is_answered(tmp_path: Path) -> None:
    for bangs, count in ((5000, 4), (5001, 2)):
        for condition in ("! " * bangs + "[ a = a ]", "[ " + "! " * bangs + "a = a ]"):
            text = f"if {condition}; then N=4; else N=2; fi\n{LAUNCH.format('--num-layers $N')}\n"
            assert layers(tmp_path, text) == count


# -- beside bash ------------------------------------------------------------------------------------------------------

NAMES = st.sampled_from("ABC")
WORDS = st.sampled_from(["1", "2", "x", "$A", "${B}", "${C:-3}", "${A:-${B:-y}}", '"$A $B"', "'$A'", "$((1+2))"])
TESTS = st.builds(
    lambda a, op, b, k: f"{k[0]} {a} {op} {b} {k[1]}",
    st.sampled_from(['"$A"', '"$B"', '"$C"', "1"]),
    st.sampled_from(["=", "!=", "=="]),
    st.sampled_from(["1", "2", "x", '"$B"']),
    st.sampled_from([("[", "]"), ("[[", "]]")]),
)
ASSIGNS = st.builds(lambda n, plus, w: f"{n}{plus}={w}", NAMES, st.sampled_from(["", "", "+"]), WORDS)


CASE = 'case "${}" in\n1) {} ;;\n2|x)\n{}\n;;\n*) {};;\nesac'


def _nested(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    block = st.lists(inner, min_size=1, max_size=3).map("\n".join)
    return (
        st.builds(lambda t, a, b: f"if {t}; then\n{a}\nelse\n{b}\nfi", TESTS, block, block)
        | st.builds(lambda t, a, u, b: f"if {t}; then {a}\nelif {u}\nthen\n{b}\nfi", TESTS, block, TESTS, block)
        | st.builds(CASE.format, NAMES, block, block, block)
        | st.builds(lambda t, a, sign: f"{t} {sign} {a}", TESTS, ASSIGNS, st.sampled_from(["&&", "||"]))
        | st.builds(lambda t, a, sign: f"{t} {sign} {{ {a}\n}}", TESTS, block, st.sampled_from(["&&", "||"]))
        | st.builds(lambda a, b: f"f() {{\n{a}\n}}\nf\n{b}", block, block)
    )  # fmt: skip


READ = [  # lines parted by ~
    'N=${N:-"4"}~if [ "$N" = 4 ]; then M=1; else M=2; fi~run --m $M',
    "N=${N:-${A:-${B:-${C:-2}}}}~: ${T:=${A:-${B:-4}}}~run $N ${T:-3} ${H:-${A:-${B:-64}}} ${N:+5} --d",
    'N=7~: ${T:="$N"} ${U=\'8\'}~A=(--t="$T" --u="${U}")~run "${A[@]}" --d',
    'N=${N:-"a b"}~run $N "$N" ${M:-"c d"} --d',
    'N="${N:-"a b"}"~M=${M:-\'c d\'}~run "$N" "$M" --d',
    "if true && false || true; then N=1; else N=2; fi~run $N --d",
    "if false || [ 1 = 1 ] && [ 2 = 3 ]; then N=1; else N=2; fi~run $N --d",
    "if [ 1 = 2 ]; [ 1 = 1 ]; then N=1; else N=2; fi~run $N --d",
    "N=4~if ((N>=4)); then M=1; else M=2; fi~if (( N < 4 )); then L=1; else L=2; fi~run $M $L --d",
    "(run --n 1)",
    'B=\'"q"\'~C=${A:-$B}~run "$C" --d',
    "[ --a = --b ] || run --n 1",
    "CMD='run --x'~eval $CMD --d",
    "run --x '<<0' --y \"<<0\" --z=\\<\\<0 --d",
    "run --x <<<'a b' --y <<< abc --d",
    "N=$(( (1<<2) ))~((1<<2))~run --x 2 --d",
    "cat <<-EOF > /dev/null~\ta 'b~\tEOF~run --x 1 --d",
    "cat <<EOF > /dev/null~ EOF~EOF~run --x 1 --d",
    "cat <<'E F' > /dev/null~it's~E F~run --x 1 --d",
    "run --x 1 <<EOF --d~isn't~EOF",
    "cat <<A > /dev/null; cat <<B > /dev/null~1~A~2~B~run --d",
    "# don't <<EOF~run --x 1 --d # <<EOF",
    "A='~--x 1~--y 2~'~run $A --d",
    'A="~--x 1 \\~--y 2~"~run $A --d',
    'A=(~--x 1 # it\'s~# --y 2~--z "a # b" "(" ~)~run "${A[@]}" --d',
    'declare -a A=(--x 1)~typeset N=8~run "${A[@]}" $N --d',
    ': ${N:=4} "${M:=5}"~run --n $N $M --d',
    "N=4~run ${N:+--n $N} ${M:+--m $M} --d",
    "N=~run --n=${N-3} --m=${N:-3} --d",
    "T=2~P=4~run --n $((64/(T*P))) --m $(( (T+1)*P )) --k $((((T))*2)) --d",
    "N=8~((N*=2))~let M=N+1~((M++))~run --n $N --m $M --d",
    'run --x "\\$N" --d',
    "true&&run --n 1",
    "run --n 1|cat",
    "run --n 1 > >(cat) 2>&1",
    "run --a=1 \\~  # --b=2 \\~  --c=3 --d=4",
    "run --a=1 \\~~  --c=3 --d=4",
    "run --a=1 --b=\\~2 --c=3~--d=4",
    "N=4~((N = 5 * 2))~((N /= 2))~((++N, N += 1))~run --n $N",
    "A=(4 5 6)~run --n $A --m ${A} --k ${A[@]}",
    'set -- --w 0 --x 1~shift 2~run "$@" --y $2 --z $# --d',
    "N=3~M=5 N=4 run --n $N --d",
    "N=4~unset N~run --n ${N:-7}",
    "X=~[ $X != a ] && N=4~[ -n $X ] && M=5~run --n ${N:-3} --m ${M:-3}",
    "f() { N=5; }~f~run --n $N",
    "N=4~f() {~local N=9~}~f~run --n $N",
    "until true; do N=4; done~while false; do M=4; done~run --n ${N:-5} --m ${M:-5}",
    'case abc in [^x]*) N=4;; *) N=5;; esac~case a in "*") M=4;; *) M=5;; esac~run --n $N --m $M',
    "if [ 1 = 1 ]; then run --n 4; exit; fi~run --n 5 --m 6",
    ": 'for later~run --a 1 --b 2 --c 3~'~run --x 1",
    ": run --a 1 --b 2 --c 3~run --x 1",
    "N=4~(N=5)~( N=6; true )~(cd /; N=7~A=(1 2)~)~run --x $N --y ${A:-3} --d",
    "N=4~(N=5; (N=6); run --x $N --y --z)~",
    "N=4~{ N=5; }~case $N in~5)~N=6~;;~(6) N=7;; esac~(( N++ ))~run --x $N --d",
    "if true; then (N=4); M=5; fi~run --x ${N:-1} --y $M",
    'N=4~run --n $[ N * 2 ] --m=$[N-1] --k "$[1+1]"',
    'run --x {1..3} --y={a,b} --z a{b,"c d"}{e,f} \'{1,2}\' "{1,2}" {} {a} ${N:-{1,2}}',
    'A=(--x {3..1})~B={1,2}~run "${A[@]}" $B --d',
    "run --x $'it\\'s' --y a$'\\t'b --z $\"q\" --w 'a$'",
    'IFS=,~A=1,2~run --x $A --y "$A" --d',
    'A=(1 2 3)~IFS=,~run --x "${A[*]}" --d',
    'A=("a b" c)~run --x "${A[*]}" --d',
    "CMD='run --n $N --m \"a b\" --d'~N=5~eval $CMD",
    "CMD='true && run --n 4 --d 2>&1 | cat'~eval \"$CMD\"",
    "CMD='run~--x 4~--d'~eval $CMD",
    "CMD='A=1~run --x 4 \\~ --d # --y~true'~eval \"$CMD\"",
    "X=\"--x 4 --y 'a b'\"~eval run $X --d",
    "declare -i N=2+3~N+=1~run --n $N --d",
    'run --x="4 - 5" --d',
    "{ run --x 1 --y 2 >& /dev/stdout; }",
]

NOT_FOLLOWED = [  # what sets a variable to what only bash knows, or may not be run
    "N=4~for N in 1 2; do :; done~run --n $N",
    "N=4~while [ $N -lt 8 ]; do N=$((N*2)); done~run --n $N",
    "N=1~for ((i=0;i<3;i++)); do N=$((N*2)); done~run --n $N",
    "A=--d~for i in 1 2; do A+=' --x 1'; done~run $A",
    "N=4~read N <<< 5~run --n $N",
    "N=4~IFS=: read N M <<< 5:6~run --n $N",
    "N=4~printf -v N %d 5~run --n $N",
    "N=4~eval 'N=5; M=6'~run --n $N",
    "N=$(echo 5)~run --n ${N:-7}",
    "N=$(echo 5)~: ${N:=7}~run --n $N",
    "N=010~run --n $((N+1))",
    "N=1+1~run --n $((N*2))",
    "N=4~((N <<= 1))~run --n $N",
    "N=4~: $((N += 2))~run --n $N",
    "A=(--x 5)~A[1]=6~run ${A[@]}",
    "A=([0]=--x [1]=5)~run ${A[@]}",
    "N=3~f() {~N=4~}~run --n $N",
    "N=3~if [ -f x ]; then N=${M:-3}; M=4; fi~M=$(echo 4)~for I in 1; do N=${M:-3}; done~run --n $N",
    "A=--d~for I in 1 2; do A=$B; B=--x; done~run $A",
    'A=--x~[ "$B" = 1 ] || A=~run $A --d',
    "f() {~local N=${1:-3}~run --n $N~}~f 7",
    "f() { N=${1:-3}; }~f 7~run --n $N",
    "set -- 1 2~f() { run --n $1 --m $#; }~f 7",
    'set -- 1 2~f() { A=("$@"); }~f 7~run --n "${A[@]}"',
    "run --x {01..08..2}",
]


@pytest.mark.parametrize("script", READ)
def test_words_are_those_of_bash(script: str) -> None:
    text = script.replace("~", "\n")
    assert read_shell(text).command == ["run", *_shown(text, check=False)]


@pytest.mark.parametrize("script", NOT_FOLLOWED)
def test_what_is_not_followed_is_marked(script: str) -> None:
    text = script.replace("~", "\n")
    found = read_shell(text).command
    assert found != ["run", *_shown(text, check=False)] and any(UNSET in w or MAYBE_SET in w for w in found)


def test_an_argument_that_an_undecided_branch_takes_away_is_listed(tmp_path: Path) -> None:
    text = 'E="--recompute-granularity full"\nif [ "$SIZE" = small ]; then E=""; fi\n'
    found = imported(tmp_path, text + LAUNCH.format("--num-layers 4 $E"))
    assert "$E" in listed(found, ASSUMED) and "recompute" not in found.job["schedule"]


def test_a_launch_has_the_environment_that_stands_before_it(tmp_path: Path) -> None:
    text = "export NVTE_X=1 NVTE_Y=1\nNVTE_Y=2 " + LAUNCH.format("--num-layers 4") + "\nexport NVTE_X=3\n"
    found = {e.argument.name: e.argument.value for e in imported(tmp_path, text).entries}
    assert (found["NVTE_X"], found["NVTE_Y"]) == ("1", "2")


def test_an_option_that_nobody_asks_for_leaves_what_was_there(tmp_path: Path) -> None:
    text = 'N=4\nwhile [ $# -gt 0 ]; do\ncase "$1" in\n--layers) N="$2"; shift 2;;\n*) shift;;\nesac\ndone\n'
    text += LAUNCH.format("--num-layers $N")
    assert layers(tmp_path, text) == 4 and listed(imported(tmp_path, text), ASSUMED) == ["--num-layers"]


@pytest.mark.parametrize("end", ["EOT", "'EOT'"])
def test_a_script_that_hands_a_script_to_a_shell_is_that_script(tmp_path: Path, end: str) -> None:
    nodes = "$SLURM_NNODES" if end == "'EOT'" else "\\$SLURM_NNODES"
    inner = LAUNCH.format("--num-layers 4").replace("torchrun", f"srun torchrun --nnodes {nodes}")
    found = imported(tmp_path, f"sbatch <<{end}\n#!/bin/bash\n#SBATCH --nodes=2\n{inner}\nEOT\necho done\n")
    assert (found.job["cluster"]["nodes"], found.job["cluster"]["gpus_per_node"]) == (2, 8)
    assert not listed(found, UNKNOWN)


def test_the_command_that_trains_is_read_and_another_one_is_said(tmp_path: Path) -> None:
    tool = "python tools/preprocess_data.py " + " ".join(f"--a{i} 1" for i in range(20)) + "\n"
    once = imported(tmp_path, tool + LAUNCH.format("--num-layers 3"))
    assert once.job["model"]["n_layer"] == 3 and not [e for e in once.entries if "trainings" in e.note]
    twice = imported(tmp_path, tool + LAUNCH.format("--num-layers 3") + "\n" + LAUNCH.format("--num-layers 5 --bf16"))
    assert twice.job["model"]["n_layer"] == 5 and [e for e in twice.entries if "2 trainings" in e.note]


def test_a_shell_within_knows_what_is_exported() -> None:
    text = "N=4\nexport M=8\nrun bash -c 'go --n $N --m $M'"
    assert read_shell(text).command == ["run", "bash", "-c", "go", "--n", UNSET, "--m", "8"]


def test_a_shell_within_a_container_within_a_shell_is_read(tmp_path: Path) -> None:
    inner = "\\\n cd /x; N=1 \\\n" + LAUNCH.format("--num-layers 4").replace("torchrun", "torchrun --nnodes 2")
    text = "if docker ps; then export run=docker; else export run=podman; fi\n#SBATCH --nodes=2\n"
    text += f"srun bash -c '$run run --gpus 4 -v a:b img /bin/bash -c \"{inner} 2>&1 | tee log; \\\n date\"'\n"
    found = imported(tmp_path, text)
    assert layers(tmp_path, text) == 4 and not listed(found, UNKNOWN)
    assert (found.job["cluster"]["nodes"], found.job["cluster"]["gpus_per_node"]) == (2, 8)


def test_lines_that_a_shell_reads_are_commands(tmp_path: Path) -> None:
    text = f"srun bash -c '\npip install x --no-deps\n{LAUNCH.format('--num-layers 4')} \\\n --bf16 # --fp16\ndate\n'\n"
    found = imported(tmp_path, text)
    assert layers(tmp_path, text) == 4 and not listed(found, UNKNOWN)
    assert found.job["precision"]["compute"] == "bf16"


def test_here_documents_are_files_and_a_quoted_end_keeps_them_as_they_are() -> None:
    text = "N=4\ncat <<E > a.json\n{$N}\nE\ncat <<'E' > b.json\n{$N}\nE\nrun --d"
    assert read_shell(text).files == {"a.json": "{4}", "b.json": "{$N}"}


def test_what_stands_behind_the_end_of_a_command_is_not_passed(tmp_path: Path) -> None:
    found = imported(tmp_path, LAUNCH.format("--num-layers 4") + " \\\n # --bf16 \\\n --fp16 --lr 1\n")
    assert listed(found, UNKNOWN) == ["--fp16", "--lr"] and found.job["precision"]["compute"] == "fp32"


@pytest.mark.parametrize("end", ["\\", "\\ ", "\\\n", "\\\\"])
def test_a_last_line_may_go_on_to_none(tmp_path: Path, end: str) -> None:
    (tmp_path / "x.sh").write_text(f"printf '%s\\n' run --x 4 --d {end}")
    done = subprocess.run(["bash", str(tmp_path / "x.sh")], capture_output=True, text=True, check=True)
    assert read_shell(f"run --x 4 --d {end}").command == done.stdout.split()


@pytest.mark.parametrize("line", ["f() {x", "function f {{a", "f () {N=1", "f() {$(a)"])
def test_a_function_whose_brace_is_no_word_is_none(tmp_path: Path, line: str) -> None:
    assert layers(tmp_path, f"{line}\n{LAUNCH.format('--num-layers 4')}\n") == 4


@pytest.mark.parametrize("word", ["{a,b}" * 18, "{1..999}{1..999}{1..999}", "{1..99999}"])
def test_braces_that_are_more_words_than_anybody_passes_are_marked(word: str) -> None:
    found = read_shell(f"run --x {word} --d").command
    assert len(found) == 4 and UNSET in found[2]
    assert read_shell("run " + "$(a)" * 200 + "{ --d").command[2:] == ["--d"]


def test_a_list_of_arguments_may_have_one_a_line(tmp_path: Path) -> None:
    assert (
        layers(tmp_path, "--hidden-size 64\n--num-layers 3 # three\n\n--num-attention-heads 4\n--seq-length 64\n") == 3
    )


GIVEN = st.builds(lambda n, plus, w: f"{n}{plus}={w}", NAMES, st.sampled_from(["", "+"]), st.sampled_from("12x"))


def _rounds(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    block = st.lists(inner, min_size=1, max_size=2).map("\n".join)
    return (
        st.builds(lambda n, w, a: f"for {n} in {w} 1; do\n{a}\ndone", NAMES, WORDS, GIVEN)
        | st.builds(lambda a: f"I=0; while [ $I -lt 2 ]; do\n{a}\nI=$((I+1))\ndone", GIVEN)
        | st.builds("read {} <<< 7\n{}".format, NAMES, block)
        | st.builds("unset {}\n{}".format, NAMES, block)
        | st.builds("(( {} = 3 * 2 ))\n{}".format, NAMES, block)
    )


SCRIPTS = st.lists(st.recursive(ASSIGNS, _nested, max_leaves=6), min_size=1, max_size=6).map("\n".join)


@settings(max_examples=60, deadline=None)
@given(SCRIPTS)
@example("A=1;B=2\nC+=x")
def test_variables_end_as_in_bash(script: str) -> None:
    text = f"A=\nB=\nC=\n{script}\n" + 'run "a=[$A]" "b=[$B]" "c=[$C]" --d'
    assert read_shell(text).command == ["run", *_shown(text, check=True)]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.recursive(ASSIGNS, lambda x: _nested(x) | _rounds(x), max_leaves=6), max_size=5).map("\n".join))
def test_variables_end_as_in_bash_or_are_marked(script: str) -> None:
    text = f"A=\nB=\nC=\n{script}\n" + 'run "a=[$A]" "b=[$B]" "c=[$C]" --d'
    pairs = zip(read_shell(text).command[1:], _shown(text, check=False), strict=True)
    for found, shown in pairs:  # blanks aside, which end no word
        assert found.replace(" ", "") == shown.replace(" ", "") or UNSET in found or MAYBE_SET in found
