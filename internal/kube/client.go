// SPDX-License-Identifier: Apache-2.0

// Package kube reads objects from the API of Kubernetes: it lists the objects of one resource, and then watches them.
//
// A [Set] holds the objects of one [Resource] as the API server reported them last. Its Run keeps the set up to date.
// A type of object is a struct with the JSON fields that its reader needs, and an embedded [Object]:
//
//	type widget struct {
//		kube.Object
//		Spec struct { Size int `json:"size"` } `json:"spec"`
//	}
//	client, err := kube.New(kube.Config{Log: log})
//	widgets := kube.NewSet[widget](client, kube.Resource{
//		Group: "example.com", Version: "v1", Name: "widgets", Namespace: client.Namespace,
//	}, kube.SetConfig[widget]{Changed: wake})
//	go widgets.Run(ctx)
//	all, listed := widgets.All()
//
// This works for built-in and for custom resources.
//
// # Promises of a set
//
//   - While the API server is unavailable, refuses requests or hangs, the set keeps its objects.
//   - After each outage the set becomes equal to the server's objects, without an order from outside.
//   - An object that is unchanged keeps its pointer. An object in a set is never written to.
//
// # Concurrency
//
// A [Client] and the methods of a [Set] may be used by any number of goroutines. The Run of a set runs once at a time.
package kube

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/kvroute/kvroute/internal/meter"
	"github.com/kvroute/kvroute/internal/silence"
)

// The files that Kubernetes mounts into a pod.
const (
	podFolder     = "/var/run/secrets/kubernetes.io/serviceaccount"
	podToken      = podFolder + "/token"
	podCA         = podFolder + "/ca.crt"
	podsNamespace = podFolder + "/namespace"
)

// Times after which a connection counts as dead, and a list as failed.
const (
	pingAfter = 15 * time.Second // of silence, an HTTP/2 ping is sent
	pingTime  = 10 * time.Second // for the answer to the ping
	listTime  = 2 * time.Minute  // for one page of a list
)

// Config configures a [Client]. The zero value is that of a pod: Kubernetes sets the address, and mounts the files.
type Config struct {
	// Server is the URL of the API server. Default: the address in the variables KUBERNETES_SERVICE_HOST and
	// KUBERNETES_SERVICE_PORT.
	Server string
	// CAFile is a PEM file with the authorities of the server's certificate. It is read for each connection. Default:
	// the pod's file; with Server, the authorities of the system.
	CAFile string
	// TokenFile is the file of the bearer token. It is read for each request, because Kubernetes renews the token.
	// Default: the pod's file; with Server, no token.
	TokenFile string
	// Log receives a line when the API begins to fail, and when it works again. Default: none.
	Log *slog.Logger

	pingAfter, pingTime time.Duration // for tests; 0 = the constants
}

// Client sends requests to an API server.
type Client struct {
	// Namespace is the namespace of this pod; empty if the process does not run in a pod.
	Namespace string

	conf Config
	http *http.Client
	log  *slog.Logger
}

// New returns a client. It sends no request. An error says that the process runs in no pod, or which setting is wrong.
func New(conf Config) (*Client, error) {
	if conf.Server == "" {
		host, port := os.Getenv("KUBERNETES_SERVICE_HOST"), os.Getenv("KUBERNETES_SERVICE_PORT")
		if host == "" || port == "" {
			return nil, errors.New("server is missing: the address of the API server is known only in a pod of Kubernetes")
		}
		conf.Server = "https://" + net.JoinHostPort(host, port)
		conf.CAFile, conf.TokenFile = cmp.Or(conf.CAFile, podCA), cmp.Or(conf.TokenFile, podToken)
	}
	if err := CheckServer(conf.Server); err != nil {
		return nil, err
	}
	conf.Server = strings.TrimSuffix(conf.Server, "/")
	conf.pingAfter, conf.pingTime = cmp.Or(conf.pingAfter, pingAfter), cmp.Or(conf.pingTime, pingTime)
	c := &Client{conf: conf, log: meter.Log(conf.Log)}
	if name, err := os.ReadFile(podsNamespace); err == nil {
		c.Namespace = strings.TrimSpace(string(name))
	}
	dialer := &net.Dialer{Timeout: 5 * time.Second}
	silence.Limit(dialer)
	c.http = &http.Client{
		Transport: &http.Transport{
			DialContext: dialer.DialContext,
			DialTLSContext: func(ctx context.Context, network, address string) (net.Conn, error) {
				return c.dialTLS(ctx, dialer, network, address)
			},
			ForceAttemptHTTP2: true,
			// The server may hang without closing connections.
			HTTP2: &http.HTTP2Config{SendPingTimeout: conf.pingAfter, PingTimeout: conf.pingTime},
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	return c, nil
}

// CheckServer returns an error for a URL that is not that of an API server.
func CheckServer(server string) error {
	u, err := url.Parse(server)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.RawQuery != "" {
		return fmt.Errorf("server is %q, want a URL as https://10.96.0.1:443", server)
	}
	return nil
}

// dialTLS connects to the server. Kubernetes may replace the file of authorities.
func (c *Client) dialTLS(ctx context.Context, dialer *net.Dialer, network, address string) (net.Conn, error) {
	conf := &tls.Config{MinVersion: tls.VersionTLS12, NextProtos: []string{"h2", "http/1.1"}}
	if c.conf.CAFile != "" {
		text, err := os.ReadFile(c.conf.CAFile)
		if err != nil {
			return nil, inPod(err)
		}
		if conf.RootCAs = x509.NewCertPool(); !conf.RootCAs.AppendCertsFromPEM(text) {
			return nil, fmt.Errorf("%s is not a PEM file with certificates", c.conf.CAFile)
		}
	}
	return (&tls.Dialer{NetDialer: dialer, Config: conf}).DialContext(ctx, network, address)
}

// inPod adds what to change if Kubernetes mounted no file.
func inPod(err error) error {
	path, ok := errors.AsType[*os.PathError](err)
	if ok && filepath.Dir(path.Path) == podFolder && errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("%w: set automountServiceAccountToken: true for kvroute's pods", err)
	}
	return err
}

// Resource selects objects of one kind.
type Resource struct {
	// Group and Version are those of the API; the group of pods is empty. Name is the plural in lower case, as in URLs.
	Group, Version, Name string
	// Namespace of the objects. Empty selects the objects of all namespaces.
	Namespace string
	// Selector is a label selector in text form, such as "app=llm,tier in (a,b)". Empty selects all.
	Selector string
	// Object is the name of the only wanted object. Empty selects all. A role with resourceNames allows only requests
	// with this name.
	Object string
}

// String names the resource for people.
func (r Resource) String() string {
	text := r.Name
	if r.Group != "" {
		text += "." + r.Group
	}
	if r.Object != "" {
		text += " " + r.Object
	}
	if r.Namespace != "" {
		text += " in namespace " + r.Namespace
	}
	return text
}

// rule is the rule of a role that allows to read the resource.
func (r Resource) rule() string {
	only := ""
	if r.Object != "" {
		only = ", resourceNames: [" + r.Object + "]"
	}
	return fmt.Sprintf("{apiGroups: [%q], resources: [%s]%s, verbs: [list, watch]}", r.Group, r.Name, only)
}

// url returns the address of a request.
func (r Resource) url(server string, query url.Values) string {
	path := "/apis/" + r.Group + "/" + r.Version
	if r.Group == "" {
		path = "/api/" + r.Version
	}
	if r.Namespace != "" {
		path += "/namespaces/" + url.PathEscape(r.Namespace)
	}
	if r.Selector != "" {
		query.Set("labelSelector", r.Selector)
	}
	if r.Object != "" {
		query.Set("fieldSelector", "metadata.name="+r.Object)
	}
	return server + path + "/" + r.Name + "?" + query.Encode()
}

// get sends a request. The verb is that of a role: list or watch. The caller closes the body.
func (c *Client) get(ctx context.Context, r Resource, verb string, query url.Values) (io.ReadCloser, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, r.url(c.conf.Server, query), nil)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Accept", "application/json")
	if c.conf.TokenFile != "" {
		token, err := os.ReadFile(c.conf.TokenFile)
		if err != nil {
			return nil, inPod(err)
		}
		req.Header.Set("Authorization", "Bearer "+strings.TrimSpace(string(token)))
	}
	resp, err := c.http.Do(req)
	if err != nil {
		if wrapped, ok := errors.AsType[*url.Error](err); ok {
			err = wrapped.Err // the URL has the whole query
		}
		return nil, fmt.Errorf("%s: %w", c.conf.Server, err)
	}
	if resp.StatusCode == http.StatusOK {
		return resp.Body, nil
	}
	defer resp.Body.Close()
	text, _ := io.ReadAll(io.LimitReader(resp.Body, 64<<10)) // what came before an error is enough
	return nil, c.newStatus(resp.StatusCode, text, r, verb)
}

// statusError is an answer of the API server that is not a success.
type statusError struct {
	code    int    // HTTP's
	message string // the server's
	advice  string // what to change; empty if unknown
	verb    string
	of      Resource
}

// Error names the resource, what the server says, and what to change.
func (e *statusError) Error() string {
	text := fmt.Sprintf("%s %s: status %d: %s", e.verb, e.of, e.code, cmp.Or(e.message, http.StatusText(e.code)))
	if e.advice != "" {
		text += "; " + e.advice
	}
	return text
}

// gone says that the server no longer has the events since the version, or the rest of the list.
func (e *statusError) gone() bool { return e.code == http.StatusGone }

func (c *Client) newStatus(code int, body []byte, r Resource, verb string) *statusError {
	e := &statusError{code: code, verb: verb, of: r}
	var status struct {
		Code    int
		Message string
	}
	if json.Unmarshal(body, &status) == nil {
		e.code, e.message = cmp.Or(status.Code, code), status.Message
	} else {
		e.message = strings.TrimSpace(string(body[:min(len(body), 200)]))
	}
	switch e.code {
	case http.StatusUnauthorized:
		e.advice = "the server does not accept the token"
		if c.conf.TokenFile != "" {
			e.advice += " in " + c.conf.TokenFile
		}
	case http.StatusForbidden:
		kind := "Role in namespace " + r.Namespace
		if r.Namespace == "" {
			kind = "ClusterRole"
		}
		e.advice = fmt.Sprintf("kvroute's service account needs a %s with the rule %s", kind, r.rule())
	case http.StatusNotFound:
		e.advice = fmt.Sprintf("the server has no resource %s of %s/%s: install its CustomResourceDefinition",
			r.Name, r.Group, r.Version)
	}
	return e
}
