// SPDX-License-Identifier: Apache-2.0

package api

import (
	"fmt"
	"mime"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strings"

	"github.com/kvroute/kvroute/dashboard"
	"github.com/kvroute/kvroute/internal/openai"
)

// open reports whether a path needs neither token nor checks of browsers. Probes have no token,
// and a reader of metrics should not have one that changes routing.
func open(path string) bool {
	return path == "/healthz" || path == "/readyz" || path == "/metrics" || path == "/openapi.yaml"
}

// withPage serves the files of the dashboard, which need neither token nor checks: they are the same
// for everybody. Requests for their paths never reach the API, whatever the rest of the path is.
func withPage(api http.Handler) http.Handler {
	page := dashboard.Handler()
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/" || strings.HasPrefix(r.URL.Path, "/dashboard/") {
			page.ServeHTTP(w, r)
			return
		}
		api.ServeHTTP(w, r)
	})
}

// noBrowsers refuses requests that a web page sends through a browser. A page can reach kvroute
// on loopback addresses of the browser's machine, and by a name of its own that resolves to
// kvroute (DNS rebinding). With tokens names are not checked: pages do not have the token.
func noBrowsers(h http.Handler, tokens bool) http.Handler {
	cross := http.NewCrossOriginProtection()
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		refuse := func(status int, param, message string) {
			failure(status, openai.InvalidRequest, param, message).Write(w)
		}
		read := r.Method == http.MethodGet || r.Method == http.MethodHead
		origin, originErr := url.Parse(r.Header.Get("Origin"))
		kind, _, _ := mime.ParseMediaType(r.Header.Get("Content-Type")) // an error: no kind
		switch {
		case open(r.URL.Path):
		case !tokens && onLoopback(r) && !literal(r.Host):
			refuse(http.StatusForbidden, "Host", fmt.Sprintf("the header Host is %q, want an IP address or localhost on a loopback address", clip(r.Host)))
			return
		case read:
		case cross.Check(r) != nil, originErr != nil, !tokens && origin.Host != "" && !literal(origin.Host):
			refuse(http.StatusForbidden, "Origin", "the request comes from a web page of another origin")
			return
		case r.ContentLength != 0 && kind != "application/json":
			refuse(http.StatusUnsupportedMediaType, "Content-Type", fmt.Sprintf("the header Content-Type is %q, want application/json", clip(r.Header.Get("Content-Type"))))
			return
		}
		h.ServeHTTP(w, r)
	})
}

// onLoopback reports whether a request came to a loopback address.
func onLoopback(r *http.Request) bool {
	at, ok := r.Context().Value(http.LocalAddrContextKey).(*net.TCPAddr)
	return ok && at.IP.IsLoopback()
}

// literal reports whether a host, with or without a port, is an address or localhost: no page can
// make it resolve to another address.
func literal(host string) bool {
	u := url.URL{Host: host}
	_, err := netip.ParseAddr(u.Hostname())
	return err == nil || u.Hostname() == "localhost"
}

func clip(s string) string { return s[:min(len(s), 128)] }
