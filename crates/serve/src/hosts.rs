//! Which names the server answers to.
//!
//! A server on the loopback address is for programs of the same machine, and a browser is one of them. A page from anywhere
//! may give its own name the address 127.0.0.1 (DNS rebinding); to the browser this server is then of the page's own
//! origin, and the page may read what it answers. But the browser still sends the page's name as the host, and by that
//! such requests are told from those that mean this machine.

use std::net::IpAddr;

use axum::http::Request;
use axum::http::header;
use axum::http::uri::Authority;

use crate::error::ServeError;

/// The names beside those of this machine itself.
#[derive(Clone, Debug)]
pub(crate) struct Hosts(Vec<String>);

impl Hosts {
    /// Nothing is checked where other machines can reach the address, since they may call it by any name, unless names are
    /// given.
    pub(crate) fn new(address: IpAddr, allowed: &[String]) -> Result<Option<Self>, ServeError> {
        let plain = |name: &String| {
            let authority = name.parse::<Authority>().ok();
            let bare = authority.filter(|authority| authority.host() == authority.as_str());
            bare.map(|_| normal(name)).ok_or_else(|| ServeError::Host(name.clone()))
        };
        let names = allowed.iter().map(plain).collect::<Result<Vec<String>, _>>()?;
        let checked = address.to_canonical().is_loopback() || !names.is_empty();
        Ok(checked.then_some(Self(names)))
    }

    /// Whether a request means this server. One without a host comes from no browser.
    pub(crate) fn are_meant_by<B>(&self, request: &Request<B>) -> bool {
        if let Some(authority) = request.uri().authority() {
            return self.knows(authority);
        }
        let mut hosts = request.headers().get_all(header::HOST).iter();
        hosts.all(|host| Authority::try_from(host.as_bytes()).is_ok_and(|host| self.knows(&host)))
    }

    fn knows(&self, authority: &Authority) -> bool {
        if authority.as_str().contains('@') {
            return false;
        }
        let host = normal(authority.host());
        let address = host.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
        let own = address.is_ok_and(|address| address.to_canonical().is_loopback());
        // Browsers never ask anybody else where such a name is.
        own || host == "localhost" || host.ends_with(".localhost") || self.0.contains(&host)
    }
}

/// Names do not differ by case, nor by the dot that may end them.
fn normal(host: &str) -> String {
    host.strip_suffix('.').unwrap_or(host).to_ascii_lowercase()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hosts(address: &str, allowed: &[&str]) -> Result<Option<Hosts>, ServeError> {
        let allowed: Vec<String> = allowed.iter().map(|&name| name.to_owned()).collect();
        Hosts::new(address.parse().unwrap(), &allowed)
    }

    #[test]
    fn names_of_this_machine_and_those_allowed() {
        let hosts = hosts("127.0.0.1", &["Models.example.org"]).unwrap().unwrap();
        for (host, known) in [
            ("localhost", true),
            ("LOCALHOST:8080", true),
            ("localhost.", true),
            ("page.localhost:1", true),
            ("127.0.0.1", true),
            ("127.9.9.9:80", true),
            ("[::1]:8080", true),
            ("[::ffff:127.0.0.1]", true),
            ("models.example.org", true),
            ("MODELS.example.org.:443", true),
            ("example.org", false),
            ("evil.models.example.org", false),
            ("models.example.org.evil.test", false),
            ("localhost.evil.test", false),
            ("127.0.0.1.evil.test", false),
            ("evil.test:8080", false),
            ("192.168.0.1", false),
            ("[::2]", false),
            ("localhost@evil.test", false),
            ("evil.test@localhost", false),
            ("notlocalhost", false),
            ("", false),
            ("a b", false),
        ] {
            let request = Request::builder().uri("/embed").header("host", host).body(()).unwrap();
            assert_eq!(hosts.are_meant_by(&request), known, "{host}");
        }
    }

    #[test]
    fn every_name_of_a_request_counts() {
        let hosts = hosts("::1", &[]).unwrap().unwrap();
        let request = || Request::builder().uri("/embed");
        assert!(hosts.are_meant_by(&request().body(()).unwrap()), "HTTP/1.0 without a host");
        let two = request().header("host", "localhost").header("host", "evil.test").body(()).unwrap();
        assert!(!hosts.are_meant_by(&two));
        let whole = Request::builder().uri("http://evil.test/embed").header("host", "localhost").body(()).unwrap();
        assert!(!hosts.are_meant_by(&whole), "the address goes before the header");
    }

    #[test]
    fn where_names_are_checked() {
        for (address, allowed, checked) in [
            ("127.0.0.1", &[][..], true),
            ("::1", &[], true),
            ("::ffff:127.0.0.1", &[], true),
            ("0.0.0.0", &[], false),
            ("192.168.0.1", &[], false),
            ("0.0.0.0", &["example.org"], true),
        ] {
            assert_eq!(hosts(address, allowed).unwrap().is_some(), checked, "{address} {allowed:?}");
        }
        for bad in ["https://example.org", "example.org:80", "", "a b", "a@b", "example.org/path"] {
            assert!(hosts("127.0.0.1", &[bad]).is_err(), "{bad}");
        }
    }
}
