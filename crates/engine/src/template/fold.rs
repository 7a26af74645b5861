//! A look at the syntax tree before it is compiled. The compiler computes constant expressions at once and without a
//! budget, so their sizes are estimated here first, and chains too long for it are refused.

use minijinja::Error;
use minijinja::machinery::ast::{BinOpKind, CallArg, Expr, Stmt};
use minijinja::value::ValueKind;

use super::bounds;

/// Longest chain of operators, deepest nesting of statements.
const MAX_CHAIN: usize = 2000;

/// An upper bound on a constant: what it occupies, and how large it is as a number.
#[derive(Clone, Copy)]
struct Size {
    bytes: f64,
    number: f64,
    /// Not a number: a string, a list or a mapping.
    text: bool,
}

type Folded = Result<Option<Size>, Error>;

/// Checks a list of statements.
///
/// # Errors
/// A constant is larger than the budget of a render, or an expression or block nests too deeply.
pub fn check<'a>(body: &[Stmt<'a>], depth: usize) -> Result<(), Error> {
    deep(depth)?;
    let e = |x: &Expr<'a>| expr(x, depth + 1).map(drop);
    let b = |x: &[Stmt<'a>]| check(x, depth + 1);
    for stmt in body {
        match stmt {
            Stmt::Template(s) => b(&s.children)?,
            Stmt::EmitExpr(s) => e(&s.expr)?,
            Stmt::ForLoop(s) => {
                e(&s.iter)?;
                s.filter_expr.as_ref().map_or(Ok(()), e)?;
                b(&s.body)?;
                b(&s.else_body)?;
            }
            Stmt::IfCond(s) => {
                e(&s.expr)?;
                b(&s.true_body)?;
                b(&s.false_body)?;
            }
            Stmt::WithBlock(s) => {
                s.assignments.iter().try_for_each(|(_, v)| e(v))?;
                b(&s.body)?;
            }
            Stmt::Set(s) => e(&s.expr)?,
            Stmt::SetBlock(s) => {
                s.filter.as_ref().map_or(Ok(()), e)?;
                b(&s.body)?;
            }
            Stmt::AutoEscape(s) => {
                e(&s.enabled)?;
                b(&s.body)?;
            }
            Stmt::FilterBlock(s) => {
                e(&s.filter)?;
                b(&s.body)?;
            }
            Stmt::Block(s) => b(&s.body)?,
            Stmt::Import(s) => e(&s.expr)?,
            Stmt::FromImport(s) => e(&s.expr)?,
            Stmt::Extends(s) => e(&s.name)?,
            Stmt::Include(s) => e(&s.name)?,
            Stmt::Macro(s) => {
                s.defaults.iter().try_for_each(e)?;
                b(&s.body)?;
            }
            Stmt::CallBlock(s) => {
                e(&s.call.expr)?;
                args(&s.call.args, depth)?;
                s.macro_decl.defaults.iter().try_for_each(e)?;
                b(&s.macro_decl.body)?;
            }
            Stmt::Do(s) => {
                e(&s.call.expr)?;
                args(&s.call.args, depth)?;
            }
            Stmt::EmitRaw(_) | Stmt::Continue(_) | Stmt::Break(_) => {}
        }
    }
    Ok(())
}

fn deep(depth: usize) -> Result<(), Error> {
    match depth > MAX_CHAIN {
        true => Err(bounds::over(format!("the template nests or chains more than {MAX_CHAIN} operations"))),
        false => Ok(()),
    }
}

fn args(args: &[CallArg<'_>], depth: usize) -> Result<(), Error> {
    args.iter().try_for_each(|a| match a {
        CallArg::Pos(x) | CallArg::Kwarg(_, x) | CallArg::PosSplat(x) | CallArg::KwargSplat(x) => {
            expr(x, depth + 1).map(drop)
        }
    })
}

/// Checks an expression; its size where the compiler would compute it.
fn expr(e: &Expr<'_>, depth: usize) -> Folded {
    deep(depth)?;
    let sub = |x: &Expr<'_>| expr(x, depth + 1);
    let none = |_| None;
    match e {
        Expr::Var(_) => Ok(None),
        Expr::Const(c) => {
            let v = &c.value;
            let number = f64::try_from(v.clone()).map_or(1.0, f64::abs);
            let bytes = match v.kind() {
                ValueKind::String => v.as_str().map_or(0, str::len) as f64,
                _ => 32.0 * (1 + v.len().unwrap_or(0)) as f64,
            };
            let text = !matches!(v.kind(), ValueKind::Number | ValueKind::Bool | ValueKind::None);
            Ok(Some(Size { bytes, number, text }))
        }
        Expr::List(l) => items(&l.items, depth),
        Expr::Tuple(l) => items(&l.items, depth),
        Expr::Map(m) => {
            let (keys, values) = (items(&m.keys, depth)?, items(&m.values, depth)?);
            Ok(keys.zip(values).map(|(k, v)| Size { bytes: k.bytes + v.bytes, number: 1.0, text: true }))
        }
        Expr::UnaryOp(u) => sub(&u.expr),
        Expr::BinOp(b) => {
            let (Some(l), Some(r)) = (sub(&b.left)?, sub(&b.right)?) else { return Ok(None) };
            let size = match b.op {
                BinOpKind::Mul if !l.text && !r.text => Size { number: l.number * r.number, ..l },
                BinOpKind::Mul => Size {
                    text: true,
                    bytes: (l.bytes * r.number.max(1.0)).max(r.bytes * l.number.max(1.0)),
                    number: 1.0,
                },
                BinOpKind::Pow => Size { number: l.number.powf(r.number), ..l },
                // Printing a list takes more than holding it, never four times as much.
                BinOpKind::Concat => Size { bytes: 4.0 * (l.bytes + r.bytes), number: 1.0, text: true },
                _ if !l.text && !r.text => Size { number: l.number + r.number, ..l },
                _ => Size { bytes: l.bytes + r.bytes, number: 1.0, text: true },
            };
            bounds::charge_string(if size.bytes < 1e15 { size.bytes as usize } else { usize::MAX })?;
            Ok(Some(size))
        }
        Expr::Compare(c) => {
            sub(&c.expr)?;
            c.ops.iter().try_for_each(|op| sub(&op.expr).map(drop))?;
            Ok(Some(Size { bytes: 32.0, number: 1.0, text: false }))
        }
        Expr::IfExpr(i) => {
            sub(&i.test_expr)?;
            sub(&i.true_expr)?;
            i.false_expr.as_ref().map_or(Ok(None), sub).map(none)
        }
        Expr::Filter(f) => {
            f.expr.as_ref().map_or(Ok(None), sub)?;
            args(&f.args, depth).map(|()| None)
        }
        Expr::Test(t) => {
            sub(&t.expr)?;
            args(&t.args, depth).map(|()| None)
        }
        Expr::GetAttr(g) => sub(&g.expr).map(none),
        Expr::GetItem(g) => {
            sub(&g.expr)?;
            sub(&g.subscript_expr).map(none)
        }
        Expr::Slice(s) => {
            sub(&s.expr)?;
            [&s.start, &s.stop, &s.step].into_iter().flatten().try_for_each(|x| sub(x).map(drop))?;
            Ok(None)
        }
        Expr::Call(c) => {
            sub(&c.expr)?;
            args(&c.args, depth).map(|()| None)
        }
    }
}

fn items(items: &[Expr<'_>], depth: usize) -> Folded {
    let mut sum = Some(Size { bytes: 32.0, number: 1.0, text: true });
    for item in items {
        let size = expr(item, depth + 1)?;
        sum = sum.zip(size).map(|(a, b)| Size { bytes: a.bytes + b.bytes + 32.0, number: 1.0, text: true });
    }
    Ok(sum)
}
