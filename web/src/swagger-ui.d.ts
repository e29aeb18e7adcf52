declare module "swagger-ui-dist/swagger-ui-es-bundle.js" {
  interface Ui {
    preauthorizeApiKey(scheme: string, key: string): void;
  }
  interface Options {
    url: string;
    domNode: Element | null;
    deepLinking: boolean;
    displayRequestDuration: boolean;
    validatorUrl: null;
    tryItOutEnabled: boolean;
    onComplete: () => void;
  }
  export default function SwaggerUI(options: Options): Ui;
}
