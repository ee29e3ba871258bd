//! `warpool top --metrics`: a server for one path, with the standard library. One connection at a time, each with a
//! bounded request and a bounded time; nothing but `GET /metrics` is answered.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use warpool_report::top::METRICS_TYPE;

use super::usage;
use crate::output::{self, Result};

/// A request of Prometheus has a few hundred bytes.
const REQUEST_BYTES: usize = 8 << 10;
/// For the whole request, and for each write of the answer.
const PATIENCE: Duration = Duration::from_secs(5);

/// Serves until the process is ended.
pub fn run(address: SocketAddr, metrics: &dyn Fn() -> Result<String>) -> Result<()> {
    let listener = TcpListener::bind(address).map_err(|error| usage(format!("cannot listen on {address}: {error}")))?;
    let bound = listener.local_addr()?;
    if !bound.ip().is_loopback() {
        output::message(format_args!(
            "warning: {bound} can be reached from other machines, and there is no password: everyone there can read \
             process names and memory"
        ));
    }
    output::message(format_args!("serving http://{bound}/metrics until Ctrl-C"));
    for stream in listener.incoming() {
        // A client that goes away is no reason to end.
        let _ = stream.and_then(|stream| serve(stream, metrics));
    }
    Ok(())
}

fn serve(mut stream: TcpStream, metrics: &dyn Fn() -> Result<String>) -> io::Result<()> {
    stream.set_write_timeout(Some(PATIENCE))?;
    let deadline = Instant::now() + PATIENCE;
    let request = read_head(&mut stream, |stream| {
        let left = deadline.saturating_duration_since(Instant::now());
        stream.set_read_timeout(Some(left.max(Duration::from_millis(1))))
    })?;
    let (status, kind, body) = match answer_to(&request) {
        Ok(()) => match metrics() {
            Ok(text) => ("200 OK", METRICS_TYPE, text),
            Err(error) => ("500 Internal Server Error", "text/plain", format!("{error}\n")),
        },
        Err(status) => (status, "text/plain", format!("{status}: only GET /metrics is answered\n")),
    };
    write!(
        stream,
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
        body.len()
    )?;
    stream.flush()
}

/// The head of a request, cut after [`REQUEST_BYTES`]. `before` is called before each read.
fn read_head<R: Read>(stream: &mut R, before: impl Fn(&R) -> io::Result<()>) -> io::Result<Vec<u8>> {
    let mut head = Vec::new();
    let mut buffer = [0; 1024];
    while head.len() < REQUEST_BYTES && !head.windows(4).any(|end| end == b"\r\n\r\n") {
        before(stream)?;
        match stream.read(&mut buffer)? {
            0 => break,
            count => head.extend_from_slice(&buffer[..count]),
        }
    }
    Ok(head)
}

/// Whether a request is for the metrics; otherwise the status of the refusal.
fn answer_to(head: &[u8]) -> std::result::Result<(), &'static str> {
    if !head.windows(4).any(|end| end == b"\r\n\r\n") {
        return Err("400 Bad Request");
    }
    let line = head.split(|&byte| byte == b'\r').next().unwrap_or_default();
    let mut words = line.split(|&byte| byte == b' ');
    let (method, path, version) = (words.next(), words.next(), words.next());
    match (method, path, version, words.next()) {
        (Some(b"GET"), Some(path), Some(b"HTTP/1.1" | b"HTTP/1.0"), None) => {
            if path == b"/metrics" || path.starts_with(b"/metrics?") { Ok(()) } else { Err("404 Not Found") }
        }
        (Some(_), Some(_), Some(version), None) if version.starts_with(b"HTTP/") => Err("405 Method Not Allowed"),
        _ => Err("400 Bad Request"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_metrics_are_answered() {
        let end = "\r\nHost: x\r\n\r\n";
        for (line, expected) in [
            ("GET /metrics HTTP/1.1", Ok(())),
            ("GET /metrics?x=1 HTTP/1.0", Ok(())),
            ("GET /metrics2 HTTP/1.1", Err("404 Not Found")),
            ("GET / HTTP/1.1", Err("404 Not Found")),
            ("POST /metrics HTTP/1.1", Err("405 Method Not Allowed")),
            ("GET /metrics HTTP/1.1 x", Err("400 Bad Request")),
            ("GET /metrics", Err("400 Bad Request")),
            ("", Err("400 Bad Request")),
        ] {
            assert_eq!(answer_to(format!("{line}{end}").as_bytes()), expected, "{line}");
        }
        assert_eq!(answer_to(b"GET /metrics HTTP/1.1\r\n"), Err("400 Bad Request"), "it is not complete");
    }

    #[test]
    fn a_request_is_read_to_its_end_or_to_the_bound() {
        let read = |text: &[u8]| read_head(&mut &*text, |_| Ok(())).unwrap().len();
        assert_eq!(read(b"GET / HTTP/1.1\r\n\r\n"), 18);
        assert_eq!(read(b"GET"), 3);
        assert_eq!(read(&[b'x'; 100_000]), REQUEST_BYTES);
    }
}
