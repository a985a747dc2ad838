"""Compile functions in a small part of Python to LLVM IR.

A function with the decorator `compiled` may contain assignments, `if`, `while`, `for` over `range`
or over a generator, arithmetic, comparisons, and calls of other such functions, of primitives and
of the functions in `_BUILTINS`. Numbers are int64, float32, float64 or boolean; a variable has the
type of the first value that it gets. Arithmetic with an int64 and a float32 number gives a float64
number, as in NumPy. Constants are computed now, and branches that they exclude are left out.

A generator is inlined into the loop that calls it: `yield` stands for the body of the loop, which
must not `break`. A generator ends at its last line, without `return`.
"""

import ast
import builtins
import linecache
import math
import operator
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import count
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir

from tgen.engine.cpu.intrinsics import Primitive, declare, f32, f64, i1, i64
from tgen.engine.cpu.target import cpu_features, cpu_name

Value = Any  # an ir.Value, or a Python or NumPy number that is known now
Parameters = Mapping["Parameter", int]


_numbers = count()  # tell functions of the same name apart


class Parameter:
    """A named constant with one value per compiled module."""


class Compiled:
    """A function to compile; one copy is made per combination of argument types."""

    def __init__(self, function: Callable[..., Any], result: ir.Type, *, inline: bool) -> None:
        self.function, self.result, self.inline = function, result, inline
        self._number = next(_numbers)
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
        self._enclosed = dict(zip(function.__code__.co_freevars, cells, strict=True))

    def find(self, name: str) -> Any:
        """Return what a name that is not a variable of the function stands for."""
        for names in (self._enclosed, self.function.__globals__):
            if name in names:
                return names[name]
        return getattr(builtins, name)

    @property
    def node(self) -> ast.FunctionDef:
        """The syntax tree of the function."""
        code = self.function.__code__
        return _functions_of_file(code.co_filename)[code.co_firstlineno]

    def add_to(
        self, module: ir.Module, types: Sequence[ir.Type], parameters: Parameters, name: str = ""
    ) -> ir.Function:
        """Return the LLVM function for arguments of these types; write it if it is missing."""
        name = name or ".".join([self.function.__qualname__, str(self._number), *map(str, types)])
        if name in module.globals:
            return module.globals[name]
        function = ir.Function(module, ir.FunctionType(self.result, types), name)
        function.linkage = "internal"
        function.attributes.add("nounwind")
        if self.inline:
            function.attributes.add("alwaysinline")
        _Emitter(self, function, parameters).emit()
        return function


def compiled(
    function: Callable[..., Any] | None = None, *, result: ir.Type = i64, inline: bool = False
) -> Any:
    """Mark a function to be compiled. Its result is an int64 number unless `result` says otherwise;
    a function without `return` returns 0."""
    if function is None:
        return lambda function: Compiled(function, result, inline=inline)
    return Compiled(function, result, inline=inline)


_parsing = threading.Lock()  # ast.parse of Python 3.11 can fail in two threads at a time


@cache
def _functions_of_file(path: str) -> dict[int, ast.FunctionDef]:
    """Return the functions of a source file by their first line, decorators included."""
    with _parsing:
        tree = ast.parse("".join(linecache.getlines(path)), path)
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    return {min([n.lineno, *(d.lineno for d in n.decorator_list)]): n for n in nodes}


class _Emitter:
    """Writes the body of one function, and of the generators that it calls."""

    def __init__(self, source: Compiled, function: ir.Function, parameters: Parameters) -> None:
        self._source, self._function, self._parameters = source, function, parameters
        self._entry = function.append_basic_block("entry")
        self._b = ir.IRBuilder(function.append_basic_block("body"))
        self._variables: dict[str, ir.Value] = {}
        self._loops: list[tuple[ir.Block, ir.Block | None]] = []  # targets of continue and break
        self._on_yield: Callable[[Value], None] | None = None  # within a generator

    def emit(self) -> None:
        """Write the whole function."""
        for argument, value in zip(self._source.node.args.args, self._function.args, strict=True):
            self._set(argument.arg, value)
        self._statements(self._source.node.body)
        if not self._b.block.is_terminated:
            self._b.ret(ir.Constant(self._source.result, 0))
        ir.IRBuilder(self._entry).branch(self._function.blocks[1])

    # Statements

    def _statements(self, nodes: Sequence[ast.stmt]) -> None:
        for node in nodes:
            if self._b.block.is_terminated:
                return
            try:
                getattr(self, f"_{type(node).__name__.lower()}")(node)
            except Exception as error:
                path = self._source.function.__code__.co_filename
                error.add_note(f"{path}:{node.lineno}: {ast.unparse(node)}")
                raise

    def _expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Yield):
            assert self._on_yield is not None
            assert node.value.value is not None
            self._on_yield(self._value(node.value.value))
        elif not isinstance(node.value, ast.Constant):  # a docstring
            self._value(node.value)

    def _assign(self, node: ast.Assign) -> None:
        (target,) = node.targets
        if isinstance(target, ast.Name):
            self._set(target.id, self._value(node.value))
            return
        assert isinstance(target, ast.Tuple)
        assert isinstance(node.value, ast.Tuple | ast.IfExp)
        values = self._tuple(node.value)
        for name, value in zip(target.elts, values, strict=True):
            assert isinstance(name, ast.Name)
            self._set(name.id, value)

    def _augassign(self, node: ast.AugAssign) -> None:
        assert isinstance(node.target, ast.Name)
        before = self._b.load(self._variables[node.target.id])
        self._set(node.target.id, self._arithmetic(node.op, before, self._value(node.value)))

    def _return(self, node: ast.Return) -> None:
        assert self._on_yield is None
        result = self._source.result
        value = 0 if node.value is None else self._value(node.value)
        self._b.ret(convert(self._b, value, result))

    def _break(self, _: ast.Break) -> None:
        after = self._loops[-1][1]
        assert after
        self._b.branch(after)

    def _continue(self, _: ast.Continue) -> None:
        self._b.branch(self._loops[-1][0])

    def _if(self, node: ast.If) -> None:
        test = self._test(node.test)
        if isinstance(test, bool):
            self._statements(node.body if test else node.orelse)
            return
        then, otherwise, after = self._blocks("then", "else", "after_if")
        self._b.cbranch(test, then, otherwise)
        for block, statements in ((then, node.body), (otherwise, node.orelse)):
            self._b.position_at_end(block)
            self._statements(statements)
            self._branch(after)
        self._b.position_at_end(after)

    def _while(self, node: ast.While) -> None:
        assert not node.orelse
        test, body, after = self._blocks("while", "body", "after_while")
        self._b.branch(test)
        self._b.position_at_end(test)
        condition = self._test(node.test)
        self._b.cbranch(convert(self._b, condition, i1), body, after)
        self._b.position_at_end(body)
        self._loop_body(node.body, test, after)
        self._branch(test)
        self._b.position_at_end(after)

    def _for(self, node: ast.For) -> None:
        assert isinstance(node.iter, ast.Call)
        assert isinstance(node.target, ast.Name)
        assert not node.orelse
        called = self._value(node.iter.func)
        arguments = [self._value(argument) for argument in node.iter.args]
        if isinstance(called, Compiled):
            self._generate(called, arguments, node.target.id, node.body)
            return
        assert called is range
        start, stop, step = (0, *arguments, 1) if len(arguments) == 1 else (*arguments, 1)[:3]
        test, body, following, after = self._blocks("for", "body", "next", "after_for")
        number, stop = self._allocate(i64, "number"), convert(self._b, stop, i64)
        self._b.store(convert(self._b, start, i64), number)
        self._b.branch(test)
        self._b.position_at_end(test)
        order = "<" if step > 0 else ">"
        now = self._b.load(number)
        self._b.cbranch(self._b.icmp_signed(order, now, stop), body, after)
        self._b.position_at_end(body)
        self._set(node.target.id, now)
        self._loop_body(node.body, following, after)
        self._branch(following)
        self._b.position_at_end(following)
        self._b.store(self._b.add(self._b.load(number), ir.Constant(i64, step)), number)
        self._b.branch(test)
        self._b.position_at_end(after)

    def _loop_body(
        self, nodes: Sequence[ast.stmt], following: ir.Block, after: ir.Block | None
    ) -> None:
        self._loops.append((following, after))
        self._statements(nodes)
        self._loops.pop()

    def _generate(
        self, generator: Compiled, arguments: Sequence[Value], name: str, body: Sequence[ast.stmt]
    ) -> None:
        """Inline a generator, with the body of the loop over it in place of `yield`."""
        outer = self._source, self._variables, self._on_yield
        inner: dict[str, ir.Value] = {}

        def on_yield(value: Value) -> None:
            self._source, self._variables, self._on_yield = outer
            self._set(name, value)
            (following,) = self._blocks("after_yield")
            self._loop_body(body, following, None)
            self._branch(following)
            self._b.position_at_end(following)
            self._source, self._variables, self._on_yield = generator, inner, on_yield

        self._source, self._variables, self._on_yield = generator, inner, on_yield
        for parameter, value in zip(generator.node.args.args, arguments, strict=True):
            self._set(parameter.arg, value)
        self._statements(generator.node.body)
        self._source, self._variables, self._on_yield = outer

    # Expressions

    def _value(self, node: ast.expr) -> Value:
        b = self._b
        match node:
            case ast.Constant():
                return node.value
            case ast.Name() if node.id in self._variables:
                return b.load(self._variables[node.id])
            case ast.Name():
                return self._known(self._source.find(node.id))
            case ast.Attribute():
                return self._known(getattr(self._value(node.value), node.attr))
            case ast.UnaryOp(op=ast.Not()):
                test = self._test(node.operand)
                return not test if isinstance(test, bool) else b.not_(test)
            case ast.UnaryOp(op=ast.USub()):
                value = self._value(node.operand)
                if not isinstance(value, ir.Value):
                    return -value
                return b.neg(value) if value.type == i64 else b.fneg(value)
            case ast.BinOp():
                return self._arithmetic(node.op, self._value(node.left), self._value(node.right))
            case ast.Compare(ops=[ast.In()], comparators=[ast.Tuple() as listed]):
                value = self._value(node.left)
                equal = [compare(b, ast.Eq(), value, self._value(one)) for one in listed.elts]
                found = equal[0]
                for one in equal[1:]:
                    found = b.or_(found, one)
                return found
            case ast.Compare(ops=[operation], comparators=[right]):
                return compare(b, operation, self._value(node.left), self._value(right))
            case ast.BoolOp():
                return self._short_circuit(node)
            case ast.IfExp():
                (value,) = self._tuple(node)
                return value
            case ast.Call():
                return self._call(node)
        raise TypeError(f"{type(node).__name__} is not supported")

    def _known(self, value: Any) -> Any:
        return self._parameters[value] if isinstance(value, Parameter) else value

    def _tuple(self, node: ast.expr) -> list[Value]:
        """Return the values of a tuple, of one of two tuples, or of a single expression."""
        if isinstance(node, ast.Tuple):
            return [self._value(one) for one in node.elts]
        if not isinstance(node, ast.IfExp):
            return [self._value(node)]
        test = self._test(node.test)
        if isinstance(test, bool):
            return self._tuple(node.body if test else node.orelse)
        then, otherwise, after = self._blocks("then", "else", "after_if")
        self._b.cbranch(test, then, otherwise)
        branches = []
        for block, expression in ((then, node.body), (otherwise, node.orelse)):
            self._b.position_at_end(block)
            values = [convert(self._b, one, type_of(one)) for one in self._tuple(expression)]
            branches.append((values, self._b.block))
            self._b.branch(after)
        self._b.position_at_end(after)
        results = []
        for one, other in zip(branches[0][0], branches[1][0], strict=True):
            result = self._b.phi(one.type)
            result.add_incoming(one, branches[0][1])
            result.add_incoming(other, branches[1][1])
            results.append(result)
        return results

    def _test(self, node: ast.expr) -> Value:
        """Return whether an expression is true: as a bool if it is known now, else as an i1."""
        value = self._value(node)
        if not isinstance(value, ir.Value):
            return bool(value)
        return value if value.type == i1 else compare(self._b, ast.NotEq(), value, 0)

    def _short_circuit(self, node: ast.BoolOp) -> Value:
        """Evaluate `and` or `or` up to the operand that decides."""
        is_and, value = isinstance(node.op, ast.And), True
        (after,) = self._blocks("decided")
        decided = []  # blocks that lead there
        for i, operand in enumerate(node.values):
            if i > 0 and isinstance(value, ir.Value):
                decided.append(self._b.block)
                (following,) = self._blocks("undecided")
                self._b.cbranch(value, *((following, after) if is_and else (after, following)))
                self._b.position_at_end(following)
            value = self._test(operand)
            if isinstance(value, bool) and value != is_and:
                break
        if not decided:
            self._function.blocks.remove(after)
            return value
        last = self._b.block
        self._b.branch(after)
        self._b.position_at_end(after)
        result = self._b.phi(i1)
        for block in decided:
            result.add_incoming(ir.Constant(i1, not is_and), block)
        result.add_incoming(convert(self._b, value, i1), last)
        return result

    def _arithmetic(self, operation: ast.operator, x: Value, y: Value) -> Value:
        if not isinstance(x, ir.Value) and not isinstance(y, ir.Value):
            return _OPERATORS[type(operation)](x, y)
        b, kind = self._b, _common_type(x, y, divides=isinstance(operation, ast.Div))
        x, y = convert(b, x, kind), convert(b, y, kind)
        if kind != i64:
            emit = {ast.Add: b.fadd, ast.Sub: b.fsub, ast.Mult: b.fmul, ast.Div: b.fdiv}
            return emit[type(operation)](x, y)
        if isinstance(operation, ast.FloorDiv | ast.Mod):
            return self._floor_divide(operation, x, y)
        emit = {
            ast.Add: b.add, ast.Sub: b.sub, ast.Mult: b.mul, ast.BitAnd: b.and_,
            ast.BitOr: b.or_, ast.LShift: b.shl, ast.RShift: b.ashr,
        }  # fmt: skip
        return emit[type(operation)](x, y)

    def _floor_divide(self, operation: ast.operator, x: ir.Value, y: ir.Value) -> ir.Value:
        """Divide as Python does, whose remainder has the sign of the divisor."""
        b, zero = self._b, ir.Constant(i64, 0)
        remainder = b.srem(x, y)
        differs = b.icmp_signed("<", b.xor(remainder, y), zero)
        below = b.and_(b.icmp_signed("!=", remainder, zero), differs)
        if isinstance(operation, ast.Mod):
            return b.select(below, b.add(remainder, y), remainder)
        return b.sub(b.sdiv(x, y), b.zext(below, i64))

    def _call(self, node: ast.Call) -> Value:
        assert not node.keywords
        called = self._value(node.func)
        arguments = [self._value(argument) for argument in node.args]
        if isinstance(called, Primitive):
            pairs = zip(arguments, called.types, strict=True)
            return called.emit(self._b, *[convert(self._b, one, kind) for one, kind in pairs])
        if isinstance(called, Compiled):
            values = [convert(self._b, one, type_of(one)) for one in arguments]
            types = [value.type for value in values]
            function = called.add_to(self._function.module, types, self._parameters)
            return self._b.call(function, values)
        return _BUILTINS[called](self._b, *arguments)

    # Blocks and variables

    def _blocks(self, *names: str) -> list[ir.Block]:
        return [self._function.append_basic_block(name) for name in names]

    def _branch(self, block: ir.Block) -> None:
        if not self._b.block.is_terminated:
            self._b.branch(block)

    def _allocate(self, kind: ir.Type, name: str) -> ir.Value:
        return ir.IRBuilder(self._entry).alloca(kind, name=name)

    def _set(self, name: str, value: Value) -> None:
        if name not in self._variables:
            self._variables[name] = self._allocate(type_of(value), name)
        variable = self._variables[name]
        self._b.store(convert(self._b, value, variable.type.pointee), variable)


def type_of(value: Value) -> ir.Type:
    """Return the type that a value has in a variable."""
    if isinstance(value, ir.Value):
        return value.type
    if isinstance(value, np.floating):
        return f32 if value.dtype == np.float32 else f64
    if isinstance(value, float):
        return f64
    if not isinstance(value, bool | int):
        raise TypeError(f"{value!r} is not a number")
    return i1 if isinstance(value, bool) else i64


def _common_type(x: Value, y: Value, *, divides: bool = False) -> ir.Type:
    kinds = [i64 if kind == i1 else kind for kind in (type_of(x), type_of(y))]
    if kinds[0] == kinds[1] and not (divides and kinds[0] == i64):
        return kinds[0]
    return f64


def convert(b: ir.IRBuilder, value: Value, kind: ir.Type) -> ir.Value:
    """Return a value as one of a type; a number that is known now becomes a constant."""
    if not isinstance(value, ir.Value):
        known = float(value) if kind in (f32, f64) else int(value)
        return ir.Constant(kind, known)
    before = value.type
    if before == kind:
        return value
    emit = {
        (i1, i64): b.zext, (i1, f32): b.uitofp, (i1, f64): b.uitofp, (i64, f32): b.sitofp,
        (i64, f64): b.sitofp, (f64, i64): b.fptosi, (f32, f64): b.fpext, (f64, f32): b.fptrunc,
    }  # fmt: skip
    return emit[before, kind](value, kind)


def compare(b: ir.IRBuilder, operation: ast.cmpop, x: Value, y: Value) -> Value:
    """Return x < y, or another comparison, as an i1, or as a bool if both are known now."""
    sign, known = _COMPARISONS[type(operation)]
    if not isinstance(x, ir.Value) and not isinstance(y, ir.Value):
        return bool(known(x, y))
    kind = _common_type(x, y)
    x, y = convert(b, x, kind), convert(b, y, kind)
    if kind == i64:
        return b.icmp_signed(sign, x, y)
    return b.fcmp_unordered(sign, x, y) if sign == "!=" else b.fcmp_ordered(sign, x, y)


def _choose(operation: ast.cmpop) -> Callable[..., Value]:
    """Return Python's min or max, which take the first of equal values."""

    def choose(b: ir.IRBuilder, first: Value, *others: Value) -> Value:
        for other in others:
            better = compare(b, operation, other, first)
            kind = _common_type(first, other)
            first = b.select(better, convert(b, other, kind), convert(b, first, kind))
        return first

    return choose


def _call_float(name: str, kind: ir.Type) -> Callable[..., Value]:
    """Return an emitter that calls a function of a number of the type, with such a result."""

    def emit(b: ir.IRBuilder, x: Value) -> Value:
        function = declare(b.module, ir.FunctionType(kind, [kind]), name)
        return b.call(function, [convert(b, x, kind)])

    return emit


def _convert_to(kind: ir.Type, known: Callable[[Any], Any]) -> Callable[..., Value]:
    return lambda b, x: convert(b, x, kind) if isinstance(x, ir.Value) else known(x)


def _is_finite(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    return b.fcmp_ordered("==", b.fsub(x, x), ir.Constant(x.type, 0.0))


_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Mod: operator.mod,
    ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv, ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_, ast.LShift: operator.lshift, ast.RShift: operator.rshift,
}  # fmt: skip
_COMPARISONS: dict[type, tuple[str, Callable[[Any, Any], Any]]] = {
    ast.Eq: ("==", operator.eq), ast.NotEq: ("!=", operator.ne), ast.Lt: ("<", operator.lt),
    ast.LtE: ("<=", operator.le), ast.Gt: (">", operator.gt), ast.GtE: (">=", operator.ge),
}  # fmt: skip
_BUILTINS: dict[Any, Callable[..., Value]] = {
    min: _choose(ast.Lt()),
    max: _choose(ast.Gt()),
    int: _convert_to(i64, int),
    np.float32: _convert_to(f32, np.float32),
    np.float64: _convert_to(f64, np.float64),
    math.sqrt: _call_float("llvm.sqrt.f32", f32),
    math.erf: _call_float("erff", f32),
    np.log: _call_float("llvm.log.f64", f64),
    np.isnan: lambda b, x: b.fcmp_unordered("uno", x, x),
    np.isfinite: _is_finite,
}


_C_FUNCTIONS = {"sched_yield", "clock_gettime", "erff", "log", "memset", "memcpy", "memmove"}


def machine_code(function: Compiled, name: str, parameters: Parameters) -> bytes:
    """Compile a function to an object file for this CPU, as a C function of that name; its
    arguments and its result are int64 numbers. Several threads may compile at the same time."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    source = ir.Module(name)
    source.triple = llvm.get_process_triple()
    types = [i64] * len(function.node.args.args)
    function.add_to(source, types, parameters, name).linkage = "external"
    module = llvm.parse_assembly(str(source), llvm.create_context())
    external = {f.name for f in module.functions if f.is_declaration and "llvm." not in f.name}
    if not external <= _C_FUNCTIONS:  # the linker ends the process if it does not find a name
        raise RuntimeError(f"the kernels call {sorted(external - _C_FUNCTIONS)}")
    machine = llvm.Target.from_triple(source.triple).create_target_machine(
        cpu=cpu_name(), features=cpu_features(), opt=3, codemodel="jitdefault", jit=True
    )
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    passes = llvm.create_pass_builder(machine, options)
    passes.getModulePassManager().run(module, passes)
    code = bytes(machine.emit_object(module))
    if b"llvm." in code:  # LLVM calls an intrinsic that it does not know, as if it was a function
        raise RuntimeError("the kernels call an LLVM intrinsic that this version does not have")
    return code
