// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"strings"
	"time"

	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// authority signs certificates.
type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	pem  []byte // of cert
}

func newAuthority() (*authority, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	a := &authority{key: key, cert: &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test-kubernetes"}, NotBefore: time.Now().Add(-time.Hour),
		NotAfter: time.Now().Add(24 * time.Hour), IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}}
	text, err := x509.CreateCertificate(rand.Reader, a.cert, a.cert, &key.PublicKey, key)
	a.pem = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: text})
	return a, err
}

// files returns the files of a new certificate for a DNS name, and of its key, by their names without the ends .crt
// and .key. ca.crt is the authority.
func (a *authority) files(file, name string) (map[string][]byte, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	serial, err := rand.Int(rand.Reader, big.NewInt(1<<62))
	if err != nil {
		return nil, err
	}
	cert, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{
		SerialNumber: serial, Subject: pkix.Name{CommonName: name}, DNSNames: []string{name}, NotBefore: a.cert.NotBefore,
		NotAfter: a.cert.NotAfter, KeyUsage: x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}, a.cert, &key.PublicKey, a.key)
	if err != nil {
		return nil, err
	}
	private, err := x509.MarshalPKCS8PrivateKey(key)
	return map[string][]byte{
		file + ".crt": pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: cert}),
		file + ".key": pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: private}), "ca.crt": a.pem,
	}, err
}

// secret makes or replaces a Secret.
func (e *env) secret(ctx context.Context, name string, files map[string][]byte) error {
	s := &core.Secret{ObjectMeta: meta.ObjectMeta{Name: name}, Data: files}
	if files["tls.crt"] != nil {
		s.Type = core.SecretTypeTLS
	}
	all := e.client.CoreV1().Secrets(namespace)
	if _, err := all.Update(ctx, s, meta.UpdateOptions{}); err == nil {
		return nil
	}
	_, err := all.Create(ctx, s, meta.CreateOptions{})
	return err
}

// renew makes a new certificate in a Secret.
func (e *env) renew(ctx context.Context, signer *authority, secret, file, name string) error {
	files, err := signer.files(file, name)
	if err != nil {
		return err
	}
	return e.secret(ctx, secret, files)
}

// encrypted runs the chart's own Envoy and kvroute with certificates for each other, as the chart's README says. A
// request that kvroute decides shows that the connection works: kvroute accepts only clients of the authority.
func (e *env) encrypted(ctx context.Context, t *tally) error {
	const server = "kvroute." + namespace + ".svc.cluster.local"
	if err := e.applyText(ctx, workers); err != nil {
		return err
	}
	signer, err := newAuthority()
	if err != nil {
		return err
	}
	renew := func(secret, file, name string) error { return e.renew(ctx, signer, secret, file, name) }
	if err := renew("kvroute-tls", "tls", server); err != nil {
		return err
	}
	if err := renew("envoy-tls", "envoy", "envoy"); err != nil {
		return err
	}
	file, err := e.bootstrap(ctx, "--extproc-name", server, "--extproc-ca", "/tls/ca.crt", "--extproc-cert", "/tls/envoy.crt",
		"--extproc-key", "/tls/envoy.key")
	if err != nil {
		return err
	}
	if err := e.install(ctx, values+`
tls: {existingSecret: kvroute-tls}
envoy:
  enabled: true
  extraVolumes: [{name: tls, secret: {secretName: envoy-tls}}]
  extraVolumeMounts: [{name: tls, mountPath: /tls, readOnly: true}]
`, "--set-file", "envoy.bootstrap="+file); err != nil {
		return err
	}
	url, err := e.address(ctx, namespace, "kvroute-envoy")
	if err != nil {
		return err
	}
	return e.underLoad(ctx, t, url, []step{
		{"a new certificate of kvroute, and a rollout of Envoy", func() error {
			if err := renew("kvroute-tls", "tls", server); err != nil {
				return err
			}
			return e.restart(ctx, "kvroute-envoy")
		}},
		{"a new certificate of Envoy, and a rollout of Envoy", func() error {
			if err := renew("envoy-tls", "envoy", "envoy"); err != nil {
				return err
			}
			return e.restart(ctx, "kvroute-envoy")
		}},
		{"rollout of kvroute", func() error { return e.restart(ctx, "kvroute") }},
		{"a killed kvroute", func() error { return e.kill(ctx, "app.kubernetes.io/component=router") }},
	})
}

// gatewayTLS has Envoy Gateway use TLS to kvroute, as the chart's README says. Envoy has no certificate: Envoy Gateway
// 1.9.1 does not send it to Envoy for external processors.
const gatewayTLS = `
apiVersion: gateway.networking.k8s.io/v1
kind: BackendTLSPolicy
metadata: {name: kvroute, namespace: llm}
spec:
  targetRefs: [{group: "", kind: Service, name: kvroute, sectionName: grpc-extproc}]
  validation:
    hostname: kvroute.llm.svc
    caCertificateRefs: [{group: "", kind: ConfigMap, name: kvroute-ca}]
---
apiVersion: gateway.envoyproxy.io/v1alpha1
kind: EnvoyProxy
metadata: {name: kvroute, namespace: llm}
spec:
  backendTLS: {alpnProtocols: [h2]}
---
apiVersion: gateway.networking.k8s.io/v1
kind: GatewayClass
metadata: {name: envoy}
spec:
  controllerName: gateway.envoyproxy.io/gatewayclass-controller
  parametersRef: {group: gateway.envoyproxy.io, kind: EnvoyProxy, name: kvroute, namespace: llm}
`

// encryptGateway makes the certificate of kvroute for gatewayTLS. It returns the values that turn TLS on.
func (e *env) encryptGateway(ctx context.Context) (string, error) {
	signer, err := newAuthority()
	if err != nil {
		return "", err
	}
	if err := e.renew(ctx, signer, "kvroute-tls", "tls", "kvroute."+namespace+".svc"); err != nil {
		return "", err
	}
	ca := "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: kvroute-ca, namespace: llm}\ndata:\n  ca.crt: |\n    " +
		strings.ReplaceAll(string(signer.pem), "\n", "\n    ")
	return "tls: {existingSecret: kvroute-tls}\nextraArgs: [--extproc-tls-client-ca=]\n", e.applyText(ctx, ca)
}
