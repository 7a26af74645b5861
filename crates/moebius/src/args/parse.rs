//! Parsers of flag values.

use model::arch::{Stretch, StretchRule};
use model::plan::partition::MAX_PARTS;

use super::DeviceList;

/// Parses a rule that stretches contexts: `yarn=4`, `linear=2`, `dynamic=2`, with the context before where one is given
/// (`yarn=4,32768`).
pub(super) fn parse_stretch(text: &str) -> Result<Stretch, String> {
    let bad = || format!("{text} is not a rule, for example yarn=4, linear=2, dynamic=2 or yarn=4,32768");
    let (rule, rest) = text.split_once('=').ok_or_else(bad)?;
    let mut rules = [StretchRule::Yarn, StretchRule::Linear, StretchRule::Dynamic].into_iter();
    let rule = rules.find(|r| r.name() == rule).ok_or_else(bad)?;
    let (factor, n_ctx) = rest.split_once(',').map_or((rest, None), |(factor, n_ctx)| (factor, Some(n_ctx)));
    let factor: f64 = factor.parse().map_err(|_| bad())?;
    if !(factor > 1.0 && factor <= 1024.0) {
        return Err(format!("the factor is {factor}, it must be more than 1 and at most 1024"));
    }
    let n_ctx_orig: Option<usize> = n_ctx.map(str::parse).transpose().map_err(|_| bad())?;
    if rule == StretchRule::Linear && n_ctx_orig.is_some() {
        return Err("linear divides all positions, whatever the context before: leave it out, as in linear=2".into());
    }
    Ok(Stretch { rule, factor, n_ctx_orig })
}

/// Parses numbers of devices: `0,1`.
pub(super) fn parse_devices(text: &str) -> Result<DeviceList, String> {
    let numbers = text.split(',').map(|number| number.trim().parse().ok()).collect::<Option<Vec<usize>>>();
    let list = numbers.as_deref().and_then(DeviceList::new);
    list.ok_or_else(|| format!("{text} is not a list of up to {MAX_PARTS} devices, for example 0,1"))
}

/// Parses the maximum number of tokens of an image.
pub(super) fn parse_image_tokens(text: &str) -> Result<usize, String> {
    const MAX: usize = 16384;
    let n = text.parse().ok().filter(|n| (1..=MAX).contains(n));
    n.ok_or_else(|| format!("{text} is not a number from 1 to {MAX}"))
}

/// Parses a number of bytes: digits, with a fraction if a unit follows.
pub(super) fn parse_bytes(text: &str) -> Result<usize, String> {
    const UNITS: [(&str, u64); 9] = [
        ("", 1),
        ("K", 1000),
        ("M", 1_000_000),
        ("G", 1_000_000_000),
        ("T", 1_000_000_000_000),
        ("KIB", 1 << 10),
        ("MIB", 1 << 20),
        ("GIB", 1 << 30),
        ("TIB", 1 << 40),
    ];
    let bad = || format!("{text} is not a size, for example 12G, 800M or 7.5GiB");
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (digits, unit) = text.split_at(end);
    let unit = unit.trim().to_ascii_uppercase();
    // `12GB` is `12G`.
    let unit = if unit.ends_with("IB") { &unit } else { unit.strip_suffix('B').unwrap_or(&unit) };
    let (_, factor) = UNITS.into_iter().find(|(name, _)| *name == unit).ok_or_else(bad)?;
    let bytes = match digits.parse::<u64>() {
        Ok(n) => n.checked_mul(factor).ok_or_else(bad)?,
        Err(_) if factor > 1 => (digits.parse::<f64>().map_err(|_| bad())? * factor as f64) as u64,
        Err(_) => return Err(bad()),
    };
    usize::try_from(bytes).map_err(|_| bad())
}

/// Parses a KL divergence to reach.
pub(super) fn parse_kl(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if value > 0.0 && value.is_finite() => Ok(value),
        _ => Err("it must be a number above 0, for example 0.02".into()),
    }
}

/// Parses an address to listen on. Names are not resolved, except for `localhost`.
pub(super) fn parse_host(text: &str) -> Result<std::net::IpAddr, String> {
    match text {
        "localhost" => Ok(std::net::Ipv4Addr::LOCALHOST.into()),
        _ => text
            .parse()
            .map_err(|_| format!("{text} is not an IP address, for example 127.0.0.1, 0.0.0.0 (all networks) or ::1")),
    }
}

/// Parses where a server is: `http://host:port` with what may follow, or `host:port`. Returns `host:port`.
pub(super) fn parse_server(text: &str) -> Result<String, String> {
    let (is_url, rest) = text.strip_prefix("http://").map_or((false, text), |rest| (true, rest));
    let server = rest.split('/').next().unwrap_or_default();
    let has_port = server.rsplit_once(':').is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok());
    match (has_port, is_url && !server.is_empty()) {
        _ if server.contains(['@', '?', '#', ' ']) || rest.contains("://") => {}
        (true, _) => return Ok(server.into()),
        (false, true) => return Ok(format!("{server}:80")),
        _ => {}
    }
    Err(format!("{text} is no address of a server, for example http://127.0.0.1:8080; TLS is not spoken"))
}

/// Parses an origin as browsers send it: `http://host:port`, or `*`.
pub(super) fn parse_origin(text: &str) -> Result<String, String> {
    let host = text.strip_prefix("http://").or(text.strip_prefix("https://"));
    let is_host = |host: &str| !host.is_empty() && !host.contains(['/', '?', '#', '@', ' ']);
    match text == "*" || host.is_some_and(is_host) {
        true => Ok(text.into()),
        false => Err(format!(
            "{text} is not an origin, for example https://example.com, http://localhost:3000, or * for any"
        )),
    }
}

/// Parses two numbers of at least 1.
pub(super) fn parse_pair(text: &str) -> Result<(usize, usize), String> {
    let numbers = text.split_once(',').map(|(a, b)| (a.trim().parse(), b.trim().parse()));
    match numbers {
        Some((Ok(a), Ok(b))) if a > 0 && b > 0 => Ok((a, b)),
        _ => Err("expected two numbers, for example 512,128".into()),
    }
}

pub(super) fn parse_bias(text: &str) -> Result<(u32, f32), String> {
    let (id, bias) = text.split_once('=').ok_or("expected ID=BIAS, for example 1024=-5")?;
    let id = id.trim().parse().map_err(|e| format!("token id {id:?}: {e}"))?;
    let bias = bias.trim().parse().map_err(|e| format!("bias {bias:?}: {e}"))?;
    Ok((id, bias))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        for (text, bytes) in [
            ("12G", Some(12_000_000_000)),
            ("12GB", Some(12_000_000_000)),
            ("800m", Some(800_000_000)),
            ("7.5GiB", Some(8_053_063_680)),
            ("64 KiB", Some(65_536)),
            ("123456", Some(123_456)),
            ("0", Some(0)),
            ("", None),
            ("G", None),
            ("1.5", None),
            ("-1G", None),
            ("12Q", None),
            ("1..2G", None),
            ("99999999999T", None),
        ] {
            assert_eq!(parse_bytes(text).ok(), bytes, "{text}");
        }
    }

    #[test]
    fn stretches() {
        for (text, expected) in [
            ("yarn=4", Some((StretchRule::Yarn, 4.0, None))),
            ("linear=1.5", Some((StretchRule::Linear, 1.5, None))),
            ("dynamic=2", Some((StretchRule::Dynamic, 2.0, None))),
            ("yarn=4,32768", Some((StretchRule::Yarn, 4.0, Some(32768)))),
            ("yarn", None),
            ("ntk=4", None),
            ("yarn=1", None),
            ("yarn=nan", None),
            ("yarn=inf", None),
            ("yarn=-4", None),
            ("linear=4,32768", None),
            ("yarn=4,", None),
            ("yarn=4,x", None),
        ] {
            let found = parse_stretch(text).ok().map(|s| (s.rule, s.factor, s.n_ctx_orig));
            assert_eq!(found, expected, "{text}");
        }
    }

    #[test]
    fn hosts_and_origins() {
        for (text, is_good) in [("localhost", true), ("::1", true), ("0.0.0.0", true), ("example.com", false)] {
            assert_eq!(parse_host(text).is_ok(), is_good, "{text}");
        }
        for (text, is_good) in [
            ("*", true),
            ("https://example.com", true),
            ("http://localhost:3000", true),
            ("foo", false),
            ("http://", false),
            ("https://example.com/", false),
        ] {
            assert_eq!(parse_origin(text).is_ok(), is_good, "{text}");
        }
    }
}
